import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_engine.data.indexed import (
    IndexedDataset,
    sequence_offsets,
    smallest_dtype_code,
)
from ds_engine.data.indexed_writer import IndexedWriter
from ds_engine.errors import DataError


def write(prefix, documents, vocab_size=1000):
    with IndexedWriter(prefix, vocab_size=vocab_size) as writer:
        for document in documents:
            writer.add_document(document)


def test_golden_bytes_u16(tmp_path):
    write(tmp_path / "a", [[1, 2, 3], [], [65535]], vocab_size=65536)
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<4H", 1, 2, 3, 65535)
    assert (tmp_path / "a.idx").read_bytes() == (
        b"MMIDIDX\x00\x00"
        + struct.pack("<Q", 1)
        + struct.pack("<B", 8)
        + struct.pack("<QQ", 3, 4)
        + struct.pack("<3i", 3, 0, 1)
        + struct.pack("<3q", 0, 6, 6)
        + struct.pack("<4q", 0, 1, 2, 3)
    )


def test_golden_bytes_i32_with_several_sequences_in_a_document(tmp_path):
    with IndexedWriter(tmp_path / "a", vocab_size=65537) as writer:
        writer.add_sequence([65536])
        writer.add_sequence([1, 2])
        writer.end_document()
        writer.end_document()
        writer.add_document([3])
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<4i", 65536, 1, 2, 3)
    assert (tmp_path / "a.idx").read_bytes() == (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 4, 3, 4)
        + struct.pack("<3i", 1, 2, 1)
        + struct.pack("<3q", 0, 4, 12)
        + struct.pack("<4q", 0, 2, 2, 3)
    )
    data = IndexedDataset(tmp_path / "a")
    assert data.document_offsets().tolist() == [0, 3, 3, 4]
    assert data.num_documents == 3


@given(st.lists(st.lists(st.integers(0, 999), max_size=5), max_size=8), st.booleans())
@settings(max_examples=30, deadline=None)
def test_round_trip(tmp_path_factory, documents, batched):
    prefix = tmp_path_factory.mktemp("rt") / "x"
    if batched:
        with IndexedWriter(prefix, vocab_size=1000) as writer:
            flat = [token for document in documents for token in document]
            writer.add_documents(flat, [len(document) for document in documents])
    else:
        write(prefix, documents)
    data = IndexedDataset(prefix)
    assert len(data) == len(documents)
    assert [data[i].tolist() for i in range(len(data))] == documents
    assert data.lengths.tolist() == [len(document) for document in documents]
    assert data.num_tokens == sum(map(len, documents))
    assert data.lengths.dtype == np.int64


PARTS = st.lists(st.lists(st.lists(st.integers(0, 999), max_size=4), max_size=4), max_size=6)


@given(PARTS, st.integers(1, 6))
@settings(max_examples=30, deadline=None)
def test_documents_of_several_sequences(tmp_path_factory, documents, batch):
    folder = tmp_path_factory.mktemp("parts")
    with IndexedWriter(folder / "a", vocab_size=1000) as writer:
        for low in range(0, len(documents), batch):
            some = documents[low : low + batch]
            sequences = [sequence for document in some for sequence in document]
            writer.add_documents(
                [token for sequence in sequences for token in sequence],
                list(map(len, sequences)),
                list(map(len, some)),
            )
    with IndexedWriter(folder / "b", vocab_size=1000) as writer:
        for document in documents:
            for sequence in document:
                writer.add_sequence(sequence)
            writer.end_document()
    for ending in (".bin", ".idx"):
        assert (folder / f"a{ending}").read_bytes() == (folder / f"b{ending}").read_bytes()
    data = IndexedDataset(folder / "a")
    starts, offsets = data.document_sequences(), data.sequence_token_offsets()
    assert (len(starts), len(offsets)) == (len(documents) + 1, len(data) + 1)
    assert (starts.dtype, offsets.dtype) == (np.int64, np.int64)
    assert [
        [data.tokens[offsets[i] : offsets[i + 1]].tolist() for i in range(*starts[d : d + 2])]
        for d in range(data.num_documents)
    ] == documents
    assert data.document_offsets().tolist() == offsets[starts].tolist()


@pytest.mark.parametrize("counts", [[1], [2, 1], [3, -1], []])
def test_sequences_that_do_not_make_the_documents_are_refused(tmp_path, counts):
    with (
        pytest.raises(DataError, match="do not divide the 2 sequences"),
        IndexedWriter(tmp_path / "a", vocab_size=9) as writer,
    ):
        writer.add_documents([1, 2, 3], [1, 2], counts)
    assert os.listdir(tmp_path) == []


def test_a_document_begun_by_hand_is_ended_first(tmp_path):
    with (
        pytest.raises(DataError, match="was not ended"),
        IndexedWriter(tmp_path / "a", vocab_size=9) as writer,
    ):
        writer.add_sequence([1])
        writer.add_documents([2], [1])


@pytest.mark.parametrize(("vocab_size", "code"), [(1, 8), (65535, 8), (65536, 8), (65537, 4)])
def test_ids_up_to_65535_are_u16_and_no_more(vocab_size, code):
    assert smallest_dtype_code(vocab_size) == code


@pytest.mark.parametrize("bad", [[65536], [-1], [1, 2**40], [2**70]])
def test_ids_out_of_range_are_refused_and_nothing_is_left(tmp_path, bad):
    with pytest.raises(DataError, match=r"outside 0\.\.65535|64-bit"):
        write(tmp_path / "a", [[5], bad], vocab_size=65536)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("bad", [[1.5], np.array([[1]]), ["a"], np.array([True])])
def test_only_flat_integers(tmp_path, bad):
    with pytest.raises(DataError, match="flat list of 64-bit"):
        write(tmp_path / "a", [bad])


def test_length_beyond_i32_is_refused(tmp_path):
    huge = np.broadcast_to(np.uint16(1), 2**31)  # takes two bytes
    with pytest.raises(DataError, match=r"2147483648 tokens.*32 bits.*split the document"):
        write(tmp_path / "a", [huge])
    with (
        pytest.raises(DataError, match="32 bits"),
        IndexedWriter(tmp_path / "b", vocab_size=9) as writer,
    ):
        writer.add_documents(huge, [2**31])


def test_offsets_do_not_overflow_32_bits():
    lengths = np.full(5, 2**31 - 1, dtype=np.int32)
    offsets = sequence_offsets(lengths, 4)
    assert offsets.tolist() == [k * (2**31 - 1) * 4 for k in range(5)]


def test_reads_past_4_gib_in_a_sparse_file(tmp_path):
    lengths = np.array([2**31 - 1, 2**31 - 1, 3], dtype="<i4")
    total = 2 * (2**31 - 1) + 3
    with open(tmp_path / "a.bin", "wb") as file:
        file.truncate(2 * total)
        file.seek(2 * (total - 3))
        file.write(struct.pack("<3H", 7, 8, 9))
    with open(tmp_path / "a.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 4))
        file.write(lengths.tobytes() + sequence_offsets(lengths, 2).tobytes())
        file.write(np.arange(4, dtype="<i8").tobytes())
    data = IndexedDataset(tmp_path / "a")
    assert data.num_tokens == total
    assert data[2].tolist() == [7, 8, 9]
    assert data.get(1, 2**31 - 2).tolist() == [0]


def test_arrays_outlive_the_dataset_and_pickle_reopens(tmp_path):
    write(tmp_path / "a", [[1, 2, 3]])
    view = IndexedDataset(tmp_path / "a")[0]
    assert view.tolist() == [1, 2, 3]
    again = pickle.loads(pickle.dumps(IndexedDataset(tmp_path / "a")))
    assert again[0].tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 5


def test_get_and_bounds(tmp_path):
    write(tmp_path / "a", [[1, 2, 3], []])
    data = IndexedDataset(tmp_path / "a")
    assert data.get(0, 1, 2).tolist() == [2, 3]
    assert data[-2].tolist() == [1, 2, 3]
    assert data[1].tolist() == []
    for arguments in [(2,), (-3,), (0, 4), (0, 1, 3), (0, -1, 2), (1, 0, 1)]:
        with pytest.raises(IndexError):
            data.get(*arguments)


def test_only_empty_documents(tmp_path):
    write(tmp_path / "a", [[], []])
    data = IndexedDataset(tmp_path / "a")
    assert (len(data), data.num_tokens, data[1].tolist()) == (2, 0, [])


def test_every_truncation_is_found(tmp_path):
    write(tmp_path / "a", [[1, 2, 3], [4]])
    for name in ("a.idx", "a.bin"):
        path = tmp_path / name
        whole = path.read_bytes()
        for size in range(len(whole)):
            path.write_bytes(whole[:size])
            with pytest.raises(DataError, match=rf"{name} holds {size} bytes"):
                IndexedDataset(tmp_path / "a")
        path.write_bytes(whole + b"\x00")
        with pytest.raises(DataError, match=rf"{name} holds {len(whole) + 1} bytes"):
            IndexedDataset(tmp_path / "a")
        path.write_bytes(whole)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"X", "not an index file"),
        (9, b"\x02", "format version 2"),
        (17, b"\x09", "type code 9"),
        (26, b"\x00", "no document boundary"),
        (34, struct.pack("<i", -1), "sequence 0 has -1 tokens"),
        (42, struct.pack("<q", 2), "sequence 0 is said to start at byte 2"),
        (50, struct.pack("<q", 5), "sequence 1 is said to start at byte 5"),
        (66, struct.pack("<q", 9), "document boundaries"),
        (74, struct.pack("<q", 1), "document boundaries"),
    ],
)
def test_damage_is_named(tmp_path, at, value, message):
    write(tmp_path / "a", [[1, 2, 3], [4]])
    path = tmp_path / "a.idx"
    raw = bytearray(path.read_bytes())
    raw[at : at + len(value)] = value
    path.write_bytes(raw)
    with pytest.raises(DataError, match=message) as caught:
        IndexedDataset(tmp_path / "a")
    assert str(path) in str(caught.value)


def test_missing_files_and_wrong_ending(tmp_path):
    with pytest.raises(DataError, match=r"a\.idx is missing"):
        IndexedDataset(tmp_path / "a")
    write(tmp_path / "a", [[1]])
    with pytest.raises(DataError, match="without its ending"):
        IndexedDataset(tmp_path / "a.bin")
    (tmp_path / "a.bin").unlink()
    with pytest.raises(DataError, match=r"a\.bin is missing"):
        IndexedDataset(tmp_path / "a")


def test_existing_output_is_kept_unless_overwritten(tmp_path):
    write(tmp_path / "a", [[1]])
    with pytest.raises(DataError, match="exist; choose another"):
        IndexedWriter(tmp_path / "a", vocab_size=9)
    with (
        pytest.raises(RuntimeError, match="stop"),
        IndexedWriter(tmp_path / "a", vocab_size=9, overwrite=True) as writer,
    ):
        writer.add_document([2])
        raise RuntimeError("stop")
    assert IndexedDataset(tmp_path / "a")[0].tolist() == [1]
    with IndexedWriter(tmp_path / "a", vocab_size=9, overwrite=True) as writer:
        writer.add_document([2])
    assert IndexedDataset(tmp_path / "a")[0].tolist() == [2]
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx"]


def test_unended_document_is_an_error(tmp_path):
    with (
        pytest.raises(DataError, match="was not ended"),
        IndexedWriter(tmp_path / "a", vocab_size=9) as writer,
    ):
        writer.add_sequence([1])
    assert os.listdir(tmp_path) == []


def test_a_kill_between_the_renames_leaves_no_index(tmp_path, monkeypatch):
    write(tmp_path / "a", [[1]])
    real = os.replace

    def replace(source, target):
        if Path(target).suffix == ".idx":
            raise OSError("killed here")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with (
        pytest.raises(DataError, match="killed here"),
        IndexedWriter(tmp_path / "a", vocab_size=9, overwrite=True) as writer,
    ):
        writer.add_document([2, 3])
    assert os.listdir(tmp_path) == ["a.bin"]  # new tokens never stand beside an old index
