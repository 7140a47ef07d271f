"""What the supervisor refuses with a code of its own."""


class FileError(Exception):
    """A file operation that failed, with a code of ours."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
