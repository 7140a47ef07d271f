"""The chat-completions dialect, one door: what a request asks, what an answer says, how a stream is made and read.

Nothing but this module and its `chat_*` parts knows the field names of that API.
"""

from orchard_proxy.wire.chat_errors import error_body, error_event
from orchard_proxy.wire.chat_fold import Answer, AnswerChoice, StreamFold, read_answer, read_usage
from orchard_proxy.wire.chat_message import canonical, identity
from orchard_proxy.wire.chat_numbers import ChoiceNumbers
from orchard_proxy.wire.chat_repair import repair_tool_arguments
from orchard_proxy.wire.chat_request import DIALECT, ChatRequest, decode, messages, sampling, tools
from orchard_proxy.wire.chat_synth import synthesise

__all__ = [
    "DIALECT",
    "Answer",
    "AnswerChoice",
    "ChatRequest",
    "ChoiceNumbers",
    "StreamFold",
    "canonical",
    "decode",
    "error_body",
    "error_event",
    "identity",
    "messages",
    "read_answer",
    "read_usage",
    "repair_tool_arguments",
    "sampling",
    "synthesise",
    "tools",
]
