"""Write journals frame by frame, and look at what the deriver made of them."""

import hashlib
import json
from pathlib import Path

import msgspec

from orchard_proxy.record.catalog import Catalog
from orchard_proxy.record.segments import (
    CONTROL_ID,
    Position,
    encode_frame,
    encode_header,
    journal_dir,
    seal,
    segment_name,
    session_seed,
)
from orchard_proxy.schema.enums import Outcome, RolloutStatus
from orchard_proxy.schema.frames import (
    BeginFrame,
    DeliveredFrame,
    EditFrame,
    EndFrame,
    FinishFrame,
    FrameType,
    HeadFrame,
    RolloutFrame,
)
from orchard_proxy.schema.records import Call


def vllm_answer(prompt: list[int], *answers: list[int], reason: str = "stop") -> bytes:
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": f"said {ids}"},
            "logprobs": {"content": [{"token": str(one), "logprob": -0.25 - index, "top_logprobs": []} for one in ids]},
            "finish_reason": reason,
            "token_ids": ids,
        }
        for index, ids in enumerate(answers)
    ]
    usage = {"prompt_tokens": len(prompt), "completion_tokens": sum(map(len, answers))}
    return json.dumps({"model": "m", "prompt_token_ids": prompt, "choices": choices, "usage": usage}).encode()


def request_body(*texts: str, **members: object) -> bytes:
    messages = [{"role": "user", "content": text} for text in texts]
    return json.dumps({"model": "asked", "messages": messages, "temperature": 0.7, **members}).encode()


class Scribe:
    """Writes a journal as the server would, but says when each frame is written."""

    def __init__(self, data_dir: Path, number: int = 1, session: bytes | None = None):
        self.data_dir = data_dir
        self.now_us = 1_000_000 * number
        self._calls = 0
        self.next_segment(number, session or hashlib.sha256(b"session %d" % number).digest()[:16])

    def next_segment(self, number: int, session: bytes | None = None) -> None:
        journal_dir(self.data_dir).mkdir(parents=True, exist_ok=True)
        self.session = session or self.session
        self.number = number
        self.path = journal_dir(self.data_dir) / segment_name("w0", number)
        self.path.write_bytes(encode_header(self.session, self.now_us))

    def write(self, kind: FrameType, call_id: bytes, payload: bytes | msgspec.Struct) -> None:
        with self.path.open("ab") as file:
            file.write(b"".join(seal(encode_frame(kind, call_id, payload), session_seed(self.session))))

    @property
    def position(self) -> Position:
        return Position(self.path.name, self.path.stat().st_size)

    def tick(self) -> int:
        self.now_us += 1000
        return self.now_us

    def rollout(self, rollout_id: str, **over) -> None:
        frame = RolloutFrame(rollout_id=rollout_id, created_us=self.tick(), **over)
        self.write(FrameType.ROLLOUT, CONTROL_ID, frame)

    def finish(self, rollout_id: str, **over) -> None:
        known = {"status": RolloutStatus.COMPLETED, "finished_us": self.tick(), **over}
        self.write(FrameType.FINISH, CONTROL_ID, FinishFrame(rollout_id=rollout_id, **known))

    def begin(self, rollout_id: str, body: bytes = b"", *, seq: int = 0, engine: str = "vllm", dialect="chat") -> bytes:
        self._calls += 1
        call_id = hashlib.sha256(b"%d %d" % (self.number, self._calls)).digest()[:16]
        begin = BeginFrame(
            rollout_id=rollout_id,
            seq=seq,
            begun_us=self.tick(),
            dialect=dialect,
            path="/v1/chat/completions",
            headers={},
            body=body or request_body("q"),
        )
        edit = EditFrame(engine=engine, engine_url="", edits=[], upstream_stream=False, logprobs_mode="raw")
        self.write(FrameType.BEGIN, call_id, begin)
        self.write(FrameType.EDIT, call_id, edit)
        return call_id

    def answer(self, call_id: bytes, body: bytes, *, status: int = 200) -> None:
        head = HeadFrame(status=status, headers={"Content-Type": "application/json"}, received_us=self.tick())
        self.write(FrameType.HEAD, call_id, head)
        half = len(body) // 2
        for part in (body[:half], body[half:]):
            self.write(FrameType.CHUNK, call_id, self.tick().to_bytes(8, "little") + part)

    def end(self, call_id: bytes, outcome: Outcome = Outcome.COMPLETE, **over) -> None:
        self.write(FrameType.END, call_id, EndFrame(outcome=outcome, ended_us=self.tick(), **over))

    def delivered(self, call_id: bytes) -> None:
        self.write(FrameType.DELIVERED, call_id, DeliveredFrame(delivered_us=self.tick()))

    def call(
        self, rollout_id: str, prompt: list[int], *answers: list[int], delivered: bool = True, body: bytes = b"", **over
    ) -> str:
        call_id = self.begin(rollout_id, body or request_body("q", n=len(answers)))
        self.answer(call_id, vllm_answer(prompt, *answers))
        self.end(call_id, **over)
        if delivered:
            self.delivered(call_id)
        return call_id.hex()


def contents(data_dir: Path) -> dict[str, object]:
    """Return all that the catalog says, and every stored row, for comparing two of them."""
    with Catalog.open(data_dir) as catalog:
        found: dict[str, object] = {}
        for rollout in catalog.iter_rollouts():
            calls = catalog.calls(rollout.rollout_id)
            found[rollout.rollout_id] = (rollout, catalog.totals(rollout.rollout_id), calls)
        with catalog._engine.connect() as connection:
            for name, key in (("calls", "call_id"), ("rollouts", "rollout_id")):
                rows = connection.exec_driver_sql(f"select * from {name} order by {key}").all()
                found[f"rows of {name}"] = [tuple(row) for row in rows]
        return found


def calls_of(data_dir: Path, rollout_id: str = "r") -> list[Call]:
    with Catalog.open(data_dir) as catalog:
        return catalog.calls(rollout_id)
