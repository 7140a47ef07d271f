from pathlib import Path
from zlib import crc32

import pytest

from orchard_proxy.errors import JournalDamagedError, JournalError
from orchard_proxy.record import segments
from orchard_proxy.record.segments import Position
from orchard_proxy.schema.frames import FrameType

SESSION = bytes(range(16))
PATH = Path("w0-000001.orj")


def test_frame_layout_is_the_contract():
    frame = segments.encode_frame(FrameType.CHUNK, SESSION, b"payload")
    data = b"".join(segments.seal(frame, segments.session_seed(SESSION)))
    assert data[:4] == (7).to_bytes(4, "little")
    assert data[4] == 5
    assert data[5:21] == SESSION
    assert data[21:-4] == b"payload"
    assert data[-4:] == crc32(SESSION + data[:-4]).to_bytes(4, "little")


def test_header_round_trip():
    data = segments.encode_header(SESSION, 12345)
    assert len(data) == segments.HEADER_BYTES
    header = segments.decode_header(data, PATH)
    assert (header.version, header.session_id, header.created_us) == (1, SESSION, 12345)


@pytest.mark.parametrize("size", range(segments.HEADER_BYTES))
def test_part_of_a_header_is_no_header(size):
    assert segments.decode_header(segments.encode_header(SESSION, 1)[:size], PATH) is None


def test_zeroed_header_is_no_header():
    assert segments.decode_header(bytes(100), PATH) is None


@pytest.mark.parametrize("offset", [0, 9, 15, 30, 39], ids=["magic", "version", "session", "time", "crc"])
def test_damaged_header_names_the_file(offset):
    data = bytearray(segments.encode_header(SESSION, 1))
    data[offset] ^= 1
    with pytest.raises((JournalDamagedError, JournalError), match=r"w0-000001\.orj"):
        segments.decode_header(bytes(data), PATH)


def test_newer_format_is_refused():
    data = segments.HEADER.pack(segments.MAGIC, 2, SESSION, 1)
    data += crc32(data).to_bytes(4, "little")
    with pytest.raises(JournalError, match="Use a newer Orchard"):
        segments.decode_header(data, PATH)


def test_positions_are_ordered_over_segments():
    ordered = [
        Position("w0-000001.orj", 40),
        Position("w0-000001.orj", 900),
        Position("w0-000002.orj", 40),
        Position("w0-000010.orj", 40),
        Position("w0-999999.orj", 40),
        Position("w0-1000000.orj", 40),
    ]
    shuffled = [ordered[number] for number in (3, 5, 0, 2, 4, 1)]
    assert sorted(shuffled) == ordered
    assert ordered[0] <= ordered[1] < ordered[2]
    assert max(ordered) >= ordered[-1]


def test_names():
    assert segments.segment_name("w0", 7) == "w0-000007.orj"
    assert segments.split_name("w0-000007.orj") == ("w0", 7)
    assert Position("w12-000007.orj", 0).worker == "w12"
    with pytest.raises(ValueError, match=r"w0-7\.orj"):
        segments.split_name("w0-7.orj")


def test_list_segments_ignores_other_files(tmp_path):
    assert segments.list_segments(tmp_path) == {}
    folder = tmp_path / "journal"
    folder.mkdir()
    for name in ("w0-000010.orj", "w0-000002.orj", "w1-000001.orj", "w0-000002.orj.torn", "w0-000002.orj.sum", "x.orj"):
        (folder / name).touch()
    found = segments.list_segments(tmp_path)
    assert {worker: [path.name for path in paths] for worker, paths in found.items()} == {
        "w0": ["w0-000002.orj", "w0-000010.orj"],
        "w1": ["w1-000001.orj"],
    }


def test_numbers_are_not_used_again(tmp_path):
    folder = tmp_path / "journal"
    folder.mkdir()
    assert segments.next_number(tmp_path, "w0") == 1
    for name in ("w0-000002.orj", "w0-000009.orj.sum", "w1-000020.orj", "w0-000030.txt"):
        (folder / name).touch()
    assert segments.next_number(tmp_path, "w0") == 10
    assert segments.next_number(tmp_path, "w1") == 21


def test_wrong_call_id_is_a_bug():
    with pytest.raises(ValueError, match="16 bytes"):
        segments.encode_frame(FrameType.END, b"short", b"")
