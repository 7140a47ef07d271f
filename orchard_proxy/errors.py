"""Vocabulary of errors. No mapping of foreign errors happens here: each edge maps its own.

Every message says what happened and what to do about it.
"""


class OrchardError(Exception):
    """Anything that Orchard raises on purpose."""


class UsageError(OrchardError):
    """The caller asked for something that cannot be: bad flag, bad file, bad field. CLI exit 2."""


class JournalError(OrchardError):
    """The journal could not be written or is locked. The call fails; nothing is lost in silence."""


class JournalDamagedError(OrchardError):
    """A segment cannot be read past some offset."""


class CatalogError(OrchardError):
    """The catalog cannot be read or written now. The journal has everything that it says."""


class CatalogDamagedError(CatalogError):
    """The catalog is no catalog any more: it must be made again from the journal."""


class UpstreamError(OrchardError):
    """The engine could not be reached, was cut off, or fell silent. `code` says which, for the record."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class ListenError(OrchardError):
    """The address to serve on cannot be had."""


class ClientGoneError(OrchardError):
    """The client closed its connection, or stopped reading for too long."""


class ControlError(OrchardError):
    """The control plane refused a request. `status` is its HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class BrokenPromptError(OrchardError):
    """A prompt is stored as a reference that leads nowhere: the catalog or the export is damaged."""


class ExportError(OrchardError):
    """An export could not be written or read."""
