"""Tell the story of a rollout call by call: tests say prompts and answers, this makes the records of them."""

import msgspec

from orchard_proxy.assemble.forest import Forest, Node, Sampled
from orchard_proxy.schema.enums import Delivery, IdsGrade, LogprobsGrade, Outcome
from orchard_proxy.schema.packed import count, pack_floats, pack_ids
from orchard_proxy.schema.records import Call, Choice, PromptRef, Rollout, Usage


def rollout(**over) -> Rollout:
    return Rollout(**{"rollout_id": "r", "group_id": "g", "reward": 1.0, **over})


def answer(index: int, ids: list[int], **over) -> Choice:
    known = {
        "index": index,
        "token_ids": pack_ids(ids),
        "logprobs": pack_floats([-0.5 - index] * len(ids)),
        "sampled_tokens": len(ids),
        "finish_reason": "stop",
        "message": msgspec.Raw(b'{"role":"assistant","content":"a%d"}' % index),
        "ids_grade": IdsGrade.ENGINE if ids else IdsGrade.NONE,
        "logprobs_grade": LogprobsGrade.PROCESSED if ids else LogprobsGrade.NONE,
    }
    return Choice(**{**known, **over})


class Story:
    """Calls in commit order."""

    def __init__(self):
        self.forest = Forest()
        self.calls: list[Call] = []

    def call(self, prompt: list[int] | None, *answers: list[int] | Choice, rejected: bool = False, **over) -> Call:
        choices = [one if isinstance(one, Choice) else answer(i, one) for i, one in enumerate(answers)]
        seq = len(self.calls)
        call_id = f"c{seq}"
        parent, ref = self._place(call_id, prompt, choices, rejected=rejected)
        record = Call(
            **{
                "call_id": call_id,
                "rollout_id": "r",
                "seq": seq,
                "commit_seq": seq,
                "dialect": "chat",
                "engine": "vllm",
                "stream": False,
                "model": "m",
                "outcome": Outcome.COMPLETE,
                "delivery": Delivery.CONFIRMED,
                "late": False,
                "failure": None,
                "begun_us": seq * 10,
                "ended_us": seq * 10 + 5,
                "ttft_s": None,
                "duration_s": 0.1,
                "parent_call_id": parent.call_id if parent else None,
                "parent_choice": parent.choice if parent else None,
                "prompt": ref,
                "prompt_tokens": None if prompt is None else len(prompt),
                "choices": choices,
                "usage": Usage(),
                "sampling": msgspec.Raw(b"{}"),
                "messages": msgspec.Raw(b'[{"role":"user","content":"q%d"}]' % seq),
                "tools": msgspec.Raw(b"null"),
                "edits": [],
                "problems": [],
                "evidence_rejected": rejected,
                "http_status": 200,
                **over,
            }
        )
        self.calls.append(record)
        return record

    def _place(
        self, call_id: str, prompt: list[int] | None, choices: list[Choice], *, rejected: bool
    ) -> tuple[Node | None, PromptRef | None]:
        if prompt is None:
            return None, None
        if rejected:
            return None, self.forest.refer(call_id, pack_ids(prompt))
        nodes = [Sampled(choice.index, choice.token_ids) for choice in choices if choice.ids_grade != "none"]
        placement = self.forest.add(call_id, pack_ids(prompt), nodes)
        return placement.parent, placement.prompt


def stored_tokens(calls: list[Call]) -> int:
    prompts = sum(count(call.prompt.new_ids) for call in calls if call.prompt)
    return prompts + sum(count(choice.token_ids) for call in calls for choice in call.choices)
