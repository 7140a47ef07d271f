"""What a model says, printed as vLLM, llama.cpp and a plain OpenAI server print it: whole or streamed, as asked.

Fake because the tests of tests/cases must choose every token. The key order and the rules of what is printed when were
taken from the captured answers in tests/data/twins. Asked without our fields these print what a client would get by
calling the engine itself, so a test can hold the proxy's answer against that, byte for byte.
"""

import json
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fakes.engine import Heard, Said, stream, whole

DONE = b"data: [DONE]\n\n"
LLAMA_PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


class Token(NamedTuple):
    """One sampled token and what a stream shows of it."""

    id: Any
    delta: dict = {}  # noqa: RUF012 -- never changed, and a tuple cannot have a default factory
    logprob: Any = -0.25
    text: str = "x"


@dataclass(frozen=True)
class Speech:
    """One choice. `message` holds what a whole answer has beside the texts, e.g. tool calls."""

    tokens: list[Token]
    finish: str | None = "stop"
    message: dict = field(default_factory=dict)
    stop_reason: Any = None

    @property
    def ids(self) -> list[Any]:
        return [token.id for token in self.tokens]

    def said(self, key: str) -> str | None:
        return "".join(token.delta.get(key) or "" for token in self.tokens) or None


def text(*pieces: str, first: int = 5, end: int | None = 2, key: str = "content", **more) -> Speech:
    """Return a choice of one token for each piece and then, unless `end` is None, a stop token."""
    tokens = [Token(first + i, {key: piece}, text=piece) for i, piece in enumerate(pieces)]
    if end is not None:
        tokens.append(Token(end, {}, text="<|im_end|>"))
    return Speech(tokens, **more)


def with_logprobs(speech: Speech, *values: Any) -> Speech:
    return replace(speech, tokens=[t._replace(logprob=v) for t, v in zip(speech.tokens, values, strict=True)])


def dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


class Vllm:
    """Answers as vLLM. `prompt` are the prompt's ids, or says them from the request's messages."""

    def __init__(self, *speeches: Speech, prompt: Any = (1, 3, 4), **printed: Any) -> None:
        self.speeches = list(speeches)
        self.prompt = prompt
        self.printed = printed

    def say(self, heard: Heard) -> Said:
        asked = heard.json
        if asked.get("stream"):
            return stream(self.events(asked), self.printed.get("sizes", 0))
        return whole(self.body(asked))

    def prompt_ids(self, asked: dict) -> list[int]:
        return list(self.prompt(asked["messages"]) if callable(self.prompt) else self.prompt)

    def usage(self, asked: dict) -> dict:
        prompt = len(self.prompt_ids(asked))
        sampled = sum(len(speech.tokens) for speech in self.speeches)
        stated = {"prompt_tokens": prompt, "total_tokens": prompt + sampled, "completion_tokens": sampled}
        return self.printed.get("usage", stated)

    def body(self, asked: dict) -> bytes:
        ids = bool(asked.get("return_token_ids"))
        choices = [self._choice(index, speech, asked) for index, speech in enumerate(self.speeches)]
        return dumps(
            {
                "id": "chatcmpl-1",
                "object": "chat.completion",
                "created": 1795961888,
                "model": asked.get("model"),
                "choices": choices,
                "service_tier": None,
                "system_fingerprint": "vllm-0.32.0",
                "usage": self.usage(asked),
                "prompt_logprobs": None,
                "prompt_token_ids": self.prompt_ids(asked) if ids else None,
                "kv_transfer_params": None,
            }
        ).encode()

    def _choice(self, index: int, speech: Speech, asked: dict) -> dict:
        spelling = self.printed.get("reasoning", "reasoning")
        shown = asked.get("include_reasoning") is not False
        message = {
            "role": "assistant",
            "content": speech.said("content"),
            "refusal": None,
            "function_call": None,
            **speech.message,
            spelling: speech.said(spelling) if shown else None,
        }
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(speech.tokens, asked),
            "finish_reason": speech.finish,
            "stop_reason": speech.stop_reason,
            "token_ids": self._ids(speech.tokens, asked),
        }

    def _hides(self, asked: dict) -> bool:
        return asked.get("include_reasoning") is False

    def _ids(self, tokens: list[Token], asked: dict) -> list | None:
        """Hiding reasoning hides ids and logprobs with it: vllm#28256."""
        return [t.id for t in tokens] if asked.get("return_token_ids") and not self._hides(asked) else None

    def _logprobs(self, tokens: list[Token], asked: dict) -> dict | None:
        if not asked.get("logprobs") or asked.get("top_logprobs", 0) is None or self._hides(asked):
            return None
        entries = [
            {"token": t.text, "logprob": t.logprob, "bytes": None, "top_logprobs": self._top(t, asked)} for t in tokens
        ]
        return {"content": entries + self.printed.get("more_entries", [])}

    @staticmethod
    def _top(token: Token, asked: dict) -> list:
        return [{"token": token.text, "logprob": token.logprob, "bytes": None}] * min(asked.get("top_logprobs", 0), 1)

    def events(self, asked: dict) -> bytes:
        chunks = [self._chunk({"role": "assistant", "content": ""}, i, asked, None) for i in range(len(self.speeches))]
        for position in range(max(len(speech.tokens) for speech in self.speeches)):
            for index, speech in enumerate(self.speeches):
                if position < len(speech.tokens):
                    chunks.append(self._chunk_of(index, speech, position, asked))
        if (asked.get("stream_options") or {}).get("include_usage"):
            head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1795961888}
            chunks.append(dumps({**head, "model": asked.get("model"), "choices": [], "usage": self.usage(asked)}))
        return b"".join(b"data: " + chunk.encode() + b"\n\n" for chunk in chunks if chunk) + DONE

    def _chunk_of(self, index: int, speech: Speech, position: int, asked: dict) -> str:
        token = speech.tokens[position]
        last = position == len(speech.tokens) - 1
        delta = token.delta
        finish = speech.finish if last else None
        metadata = self._ids([token], asked) or self._logprobs([token], asked)
        if self._hides(asked):
            delta = self._hidden(delta)
        if not delta and finish is None and not metadata:
            return ""
        return self._chunk(delta, index, asked, token, finish=finish, stop_reason=speech.stop_reason)

    @staticmethod
    def _hidden(delta: dict) -> dict:
        """Say null for the reasoning beside what is said, and nothing where nothing is."""
        rest = {key: value for key, value in delta.items() if key not in ("reasoning", "reasoning_content")}
        content = {"content": rest["content"]} if "content" in rest else {}
        return {**content, "reasoning": None, **rest} if any(rest.values()) else {}

    def _chunk(self, delta, index, asked, token, *, finish=None, stop_reason=None) -> str:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs([token], asked) if token else None,
            "finish_reason": finish,
        }
        if finish:
            choice["stop_reason"] = stop_reason
        if token:
            choice["token_ids"] = self._ids([token], asked)
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1795961888}
        rest = {} if token else {"prompt_token_ids": self.prompt_ids(asked) if asked.get("return_token_ids") else None}
        return dumps({**head, "model": asked.get("model"), "choices": [choice], **rest})


class LlamaCpp:
    """Answers as llama.cpp's server. `__verbose` reports the last choice alone, as the real one does."""

    def __init__(self, *speeches: Speech, prompt: Any = (1, 3, 4)) -> None:
        self.speeches = list(speeches)
        self.prompt = prompt

    def say(self, heard: Heard) -> Said:
        asked = heard.json
        if heard.path == "/apply-template":
            self._messages = asked["messages"]
            return whole({"prompt": LLAMA_PROMPT})
        if heard.path == "/tokenize":
            return whole({"tokens": self._prompt_ids(self._messages)})
        return stream(self.events(asked)) if asked.get("stream") else whole(self.body(asked))

    def _prompt_ids(self, messages: list) -> list[int]:
        return list(self.prompt(messages) if callable(self.prompt) else self.prompt)

    @staticmethod
    def _entries(tokens: list[Token], asked: dict) -> dict:
        if not (asked.get("logprobs") is True and asked.get("top_logprobs", 1)) and not asked.get("n_probs"):
            return {}
        entries = [
            {"id": t.id, "token": t.text, "bytes": list(t.text.encode()[:99]), "logprob": t.logprob, "top_logprobs": []}
            for t in tokens
        ]
        return {"logprobs": {"content": entries}}

    def _usage(self, asked: dict) -> dict:
        prompt, sampled = len(self._prompt_ids(asked["messages"])), len(self.speeches[-1].tokens)
        return {"completion_tokens": sampled, "prompt_tokens": prompt, "total_tokens": prompt + sampled}

    def body(self, asked: dict) -> bytes:
        choices = [
            {
                "finish_reason": speech.finish,
                "index": index,
                "message": {
                    "role": "assistant",
                    "content": speech.said("content") or "",
                    **({"reasoning_content": r} if (r := speech.said("reasoning_content")) else {}),
                    **speech.message,
                },
                **self._entries(speech.tokens, asked),
            }
            for index, speech in enumerate(self.speeches)
        ]
        report = {}
        if asked.get("verbose"):
            last = len(self.speeches) - 1
            ids = self.speeches[last].ids if asked.get("return_tokens") else []
            report = {"__verbose": {"index": last, "tokens": ids, "prompt": LLAMA_PROMPT, "generation_settings": {}}}
        head = {"created": 1795962366, "model": asked.get("model"), "system_fingerprint": "b0"}
        foot = {"object": "chat.completion", "usage": self._usage(asked), "id": "chatcmpl-1"}
        return dumps({"choices": choices, **head, **foot, **report, "timings": {"predicted_n": 1}}).encode()

    def events(self, asked: dict) -> bytes:
        chunks = []
        for index, speech in enumerate(self.speeches):
            chunks.append(self._chunk(index, {"role": "assistant", "content": None}, [], asked))
            chunks += [self._chunk(index, t.delta, [t], asked) for t in speech.tokens if t.delta]
            chunks.append(self._chunk(index, {}, [], asked, finish=speech.finish))
        if (asked.get("stream_options") or {}).get("include_usage"):
            chunks.append(dumps({"choices": [], "object": "chat.completion.chunk", "usage": self._usage(asked)}))
        return b"".join(b"data: " + chunk.encode() + b"\n\n" for chunk in chunks) + DONE

    def _chunk(self, index, delta, tokens, asked, *, finish=None) -> str:
        choice = {"finish_reason": finish, "index": index, "delta": delta}
        choice |= self._entries(tokens, asked) if tokens else {}
        head = {"created": 1795962366, "id": "chatcmpl-1", "model": asked.get("model"), "system_fingerprint": "b0"}
        return dumps({"choices": [choice], **head, "object": "chat.completion.chunk"})


class OpenAi(Vllm):
    """Answers without token ids, whatever is asked."""

    def say(self, heard: Heard) -> Said:
        asked = {k: v for k, v in heard.json.items() if k not in ("return_token_ids", "logprobs", "top_logprobs")}
        heard = replace(heard, body=dumps(asked).encode())
        return super().say(heard)


SPEAKERS = {"vllm": Vllm, "llamacpp": LlamaCpp, "openai": OpenAi}
