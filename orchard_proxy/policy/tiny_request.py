"""What the requests of the tiny policy mean: decoded, checked, with vLLM's defaults and refusals.

Not HTTP and not generation. Invariant: whatever JSON comes, the result is a struct or a RequestError, never a crash.
"""

from typing import Any

import msgspec

from orchard_proxy.policy.tiny_fields import Fields, RequestError, invalid, is_int, refused
from orchard_proxy.policy.tiny_messages import chat_messages
from orchard_proxy.policy.tiny_model import VOCAB
from orchard_proxy.policy.tiny_sampling import SamplingParams
from orchard_proxy.policy.tiny_template import Message

MAX_LOGPROBS = 20
MAX_N = 64
DEFAULT_MAX_TOKENS = 1024
"""For chat without a limit. vLLM would go on to the end of the context; a random model sometimes would too."""


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What the answer shall carry, for either route."""

    stream: bool
    include_usage: bool
    continuous_usage: bool
    n: int
    logprobs: int | None
    prompt_logprobs: int | None
    token_ids: bool
    tokens_as_ids: bool
    prompt_text: bool = False
    reasoning: bool = True

    @property
    def instrumented(self) -> bool:
        """Whether chunks without text are sent, because they carry ids or logprobs."""
        return self.reasoning and (self.token_ids or self.logprobs is not None)


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    tool_choice: str
    params: SamplingParams
    max_tokens: int | None
    output: Output
    add_generation_prompt: bool

    @property
    def parse_tools(self) -> bool:
        """Whether tool calls are looked for in the answer."""
        return bool(self.tools) and self.tool_choice != "none"


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompts: list[str | list[int]]
    params: SamplingParams
    max_tokens: int | None
    output: Output


def chat_request(body: dict[str, Any], *, model: str) -> ChatRequest:
    """Decode a chat request."""
    fields = Fields(body)
    messages = chat_messages(fields)
    tools = fields.objects("tools")
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs") or 0
    if top != 0 and not wanted:
        raise refused("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
    # As in vLLM, an explicit null is not the default of 0: it yields no log-probabilities.
    shown = wanted and ("top_logprobs" not in body or body["top_logprobs"] is not None)
    output = _output(fields, logprobs=top if shown else None)
    check_model(fields, model)
    params = _sampling(fields)
    _check_output(output)
    limit = _max_tokens(fields, "max_completion_tokens", "max_tokens")
    return ChatRequest(
        messages=messages,
        tools=tools,
        tool_choice=_tool_choice(body, tools),
        params=params,
        max_tokens=limit,
        output=output,
        add_generation_prompt=fields.boolean("add_generation_prompt", default=True),
    )


def completion_request(body: dict[str, Any], *, model: str) -> CompletionRequest:
    """Decode a completions request."""
    fields = Fields(body)
    output = _output(fields, logprobs=fields.integer("logprobs"))
    check_model(fields, model)
    if fields.boolean("echo"):
        raise refused("echo is not offered here; ask for prompt_logprobs instead.", "echo")
    params = _sampling(fields)
    _check_output(output)
    prompts = _prompts(body.get("prompt"))
    limit = _max_tokens(fields, "max_tokens")
    return CompletionRequest(prompts=prompts, params=params, max_tokens=limit, output=output)


def check_model(fields: Fields, model: str) -> None:
    """Refuse a model that is not served; no model means the one that is."""
    asked = fields.string("model")
    if asked is not None and asked != model:
        message = f"The model `{asked}` does not exist. Valid aliases: {model}."
        raise RequestError(message, status=404, kind="NotFoundError", param="model")


def limited(
    params: SamplingParams, asked: int | None, *, prompt_tokens: int, context: int, default: int
) -> SamplingParams:
    """Return params with max_tokens resolved against the context length."""
    if prompt_tokens >= context:
        seen = min(prompt_tokens, context + 1)
        message = (
            f"This model's maximum context length is {context} tokens. However, your prompt contains at least {seen} "
            "input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the "
            "input prompt."
        )
        raise refused(message, "input_tokens", seen)
    if asked is not None and prompt_tokens + asked > context:
        message = (
            f"This model's maximum context length is {context} tokens. However, you requested {asked} output tokens "
            f"and your prompt contains at least {prompt_tokens} input tokens, for a total of at least "
            f"{prompt_tokens + asked} tokens. Please reduce the length of the input prompt or the number of requested "
            "output tokens."
        )
        raise refused(message, "input_tokens", prompt_tokens)
    limit = min(default, context - prompt_tokens) if asked is None else asked
    return msgspec.structs.replace(params, max_tokens=limit)


def _tool_choice(body: dict[str, Any], tools: list[dict[str, Any]] | None) -> str:
    choice = body.get("tool_choice")
    if choice is None:
        return "auto" if tools else "none"
    if isinstance(choice, dict):
        return "named"
    if isinstance(choice, str) and choice in {"auto", "none", "required"}:
        return choice
    raise refused('`tool_choice` must be either a named tool, "auto", "required" or "none".', "tool_choice")


def _output(fields: Fields, *, logprobs: int | None) -> Output:
    stream = fields.boolean("stream")
    options = Fields(fields.object("stream_options"))
    if fields.body.get("stream_options") is not None and not stream:
        raise refused("Stream options can only be defined when `stream=True`.", "stream_options")
    prompt_logprobs = fields.integer("prompt_logprobs")
    if prompt_logprobs is not None and stream:
        raise refused("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
    n = fields.integer("n")
    return Output(
        stream=stream,
        include_usage=options.boolean("include_usage"),
        continuous_usage=options.boolean("include_usage") and options.boolean("continuous_usage_stats"),
        n=1 if n is None else n,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        token_ids=fields.boolean("return_token_ids"),
        tokens_as_ids=fields.boolean("return_tokens_as_token_ids"),
        prompt_text=fields.boolean("return_prompt_text"),
        reasoning=fields.boolean("include_reasoning", default=True),
    )


def _check_output(output: Output) -> None:
    if output.n < 1:
        raise RequestError(f"n must be at least 1, got {output.n}.")
    if output.n > MAX_N:
        raise RequestError(f"n must be at most {MAX_N}, got {output.n}.")
    for name, value in (("logprobs", output.logprobs), ("prompt_logprobs", output.prompt_logprobs)):
        if value is not None and value > MAX_LOGPROBS:
            sort = "sample" if name == "logprobs" else "prompt"
            message = f"Requested {sort} logprobs of {value}, which is greater than max allowed: {MAX_LOGPROBS}"
            raise refused(message, name, value)
        if value is not None and value < 0:
            raise refused(f"{name} must be non-negative, got {value}.", name, value)


def _max_tokens(fields: Fields, *names: str) -> int | None:
    for name in names:
        value = fields.integer(name)
        if value is not None and value < 1:
            raise refused(f"max_tokens must be at least 1, got {value}.", "max_tokens", value)
        if value is not None:
            return value
    return None


def _sampling(fields: Fields) -> SamplingParams:
    bias = fields.object("logit_bias")
    params = SamplingParams(
        temperature=fields.number("temperature", 1.0),
        top_p=fields.number("top_p", 1.0),
        top_k=fields.integer("top_k") or 0,
        min_p=fields.number("min_p", 0.0),
        presence_penalty=fields.number("presence_penalty", 0.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0),
        logit_bias=_logit_bias(bias),
        seed=fields.integer("seed"),
        min_tokens=fields.integer("min_tokens") or 0,
        stop=tuple(s for s in fields.strings("stop") if s),
        stop_token_ids=fields.integers("stop_token_ids"),
        include_stop_str_in_output=fields.boolean("include_stop_str_in_output"),
        ignore_eos=fields.boolean("ignore_eos"),
    )
    _check_ranges(params)
    bad = next((t for t in (*params.logit_bias, *params.stop_token_ids) if not 0 <= t < VOCAB), None)
    if bad is not None:
        raise RequestError(f"token_id {bad} in logit_bias or stop_token_ids is out of the vocabulary of {VOCAB}")
    return params


def _check_ranges(params: SamplingParams) -> None:
    # Written so that NaN fails too.
    checks = [
        ("temperature", 0 <= params.temperature < float("inf"), "must be non-negative"),
        ("top_p", 0 < params.top_p <= 1, "must be in (0, 1]"),
        ("top_k", params.top_k >= -1, "must be 0 (disable), or at least 1"),
        ("min_p", 0 <= params.min_p <= 1, "must be in [0, 1]"),
        ("presence_penalty", -2 <= params.presence_penalty <= 2, "must be in [-2, 2]"),
        ("frequency_penalty", -2 <= params.frequency_penalty <= 2, "must be in [-2, 2]"),
        ("repetition_penalty", 0 < params.repetition_penalty < float("inf"), "must be greater than zero"),
        ("min_tokens", params.min_tokens >= 0, "must be greater than or equal to 0"),
    ]
    for name, good, rule in checks:
        if not good:
            value = getattr(params, name)
            raise refused(f"{name} {rule}, got {value}.", name, value)


def _logit_bias(raw: dict[str, Any]) -> dict[int, float]:
    try:
        return {int(token): min(100.0, max(-100.0, float(bias))) for token, bias in raw.items()}
    except (ValueError, TypeError) as error:
        raise refused("logit_bias must map token ids to numbers.", "logit_bias") from error


def _prompts(raw: Any) -> list[str | list[int]]:
    """Return the prompts: a string, ids, or a list of either."""
    if raw is None:
        raise refused("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if isinstance(raw, str) or (isinstance(raw, list) and raw and all(is_int(item) for item in raw)):
        raw = [raw]
    if not isinstance(raw, list) or not raw:
        raise invalid("list_type", "body.prompt", "Input should be a string, token ids, or a list of them", raw)
    for prompt in raw:
        check_ids(prompt)
    return raw


def check_ids(prompt: Any) -> None:
    """Refuse what is neither text nor ids of the vocabulary."""
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, list) or not all(is_int(item) for item in prompt):
        raise invalid("list_type", "body.prompt", "Input should be a string, token ids, or a list of them", prompt)
    bad = next((item for item in prompt if not 0 <= item < VOCAB), None)
    if bad is not None:
        raise RequestError(f"Token id {bad} is out of vocabulary")
