"""What a worker process does with a batch of records: documents or examples to ids."""

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from preprocessing.document import Fields, Label, Problem, Record, read_document, read_example
from preprocessing.labels import label_number, note_label
from preprocessing.sentences import split_sentences
from preprocessing.tokenize import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class Task:
    """What is made of each record.

    Attributes:
        tokenizer: path of the tokenizer.
        eod: end-of-document token; None: the tokenizer's usual one.
        text_key: key of the text in JSON lines.
        split_sentences: each sentence is a sequence.
        fields: each of these keys is a sequence; None: the record is one text.
        labels: number of each class, if the fields have a label.
    """

    tokenizer: str
    eod: str | None
    text_key: str
    split_sentences: bool
    fields: Fields | None
    labels: Mapping[str, int]

    @property
    def ends_documents(self) -> bool:
        """Whether the end-of-document id is written: where a document is one sequence of text."""
        return not self.split_sentences and self.fields is None


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker gets: it opens the tokenizer itself, once."""

    task: Task
    records: list[Record]


@dataclass(slots=True)
class Batch:
    """What a worker returns.

    Attributes:
        tokens: all ids in a row.
        records: records read.
        bad: those that lost something.
        unknown: tokens that stand for text the tokenizer cannot express.
        lengths: tokens in each sequence.
        sequences: sequences in each document.
        arguments: input argument of each document.
        problems: what was wrong.
    """

    tokens: npt.NDArray[np.generic]
    records: int
    bad: int = 0
    unknown: int = 0
    lengths: list[int] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)
    arguments: list[int] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def tokenize(job: Job) -> Batch:
    """Read and tokenize the records of a job.

    Raises:
        DataError: a label that is no class.
    """
    task = job.task
    tokenizer = _tokenizer(task.tokenizer, task.eod, os.stat(task.tokenizer).st_mtime)
    batch = Batch(tokens=np.empty(0, dtype=np.int32), records=len(job.records))
    kept: list[tuple[Record, list[str], int | None]] = []
    for record in job.records:
        parts = _parts(record, task, batch)
        if parts is not None:
            kept.append((record, *parts))
    encoded = iter(tokenizer.encode_batch([text for _, texts, _ in kept for text in texts]))
    ids: list[int] = []
    for record, texts, label in kept:
        sequences = [next(encoded) for _ in texts]
        if task.split_sentences:
            sequences = [tokens for tokens in sequences if tokens]
        if not _says_something(sequences, task.fields):
            detail = "the tokenizer leaves nothing of its text"
            batch.problems.append(Problem("empty", record.where, detail))
            continue
        if task.ends_documents:
            sequences[-1].append(tokenizer.eod_id)
        batch.unknown += sum(_unknown(tokens, tokenizer) for tokens in sequences)
        if label is not None:
            sequences.append([label])
        for tokens in sequences:
            ids += tokens
            batch.lengths.append(len(tokens))
        batch.sequences.append(len(sequences))
        batch.arguments.append(record.argument)
    batch.tokens = np.array(ids, dtype=np.uint16 if tokenizer.vocab_size <= 65536 else np.int32)
    return batch


def find_labels(job: Job) -> dict[tuple[str, Label], str]:
    """Return the classes that the records of a job name, see ``note_label``."""
    assert job.task.fields is not None
    found: dict[tuple[str, Label], str] = {}
    for record in job.records:
        example, _ = read_example(record, job.task.fields)
        if example is not None and example.label is not None:
            note_label(found, example.label, example.where)
    return found


def _parts(record: Record, task: Task, batch: Batch) -> tuple[list[str], int | None] | None:
    """The texts of a record and its class, or None if it is dropped; counts what is wrong."""
    label: int | None = None
    texts: list[str] | None = None
    if task.fields is None:
        document, problems = read_document(record, task.text_key)
        if document is not None:
            text = document.text
            texts = _sentences(text) if task.split_sentences else [text]
    else:
        example, problems = read_example(record, task.fields)
        if example is not None:
            texts = list(example.texts)
            if example.label is not None:
                label = label_number(example.label, task.labels, example.where)
    batch.problems += problems
    batch.bad += any(problem.is_bad for problem in problems)
    return None if texts is None else (texts, label)


def _sentences(text: str) -> list[str]:
    """The sentences of a document, with white space before each and none behind the last.

    So the first one gets a space. A tokenizer to which white space is something would otherwise
    tell where a document begins and ends, and with it which of two sentences came first: what a
    model of sentence pairs shall learn to see from what they say.
    """
    first, *others = split_sentences(text.rstrip() or text)
    return [first if first[:1].isspace() else f" {first}", *others]


def _says_something(sequences: list[list[int]], fields: Fields | None) -> bool:
    """Whether no sequence that is needed is empty."""
    if fields is None:
        return any(sequences)
    return all(tokens or fields.may_be_empty(i) for i, tokens in enumerate(sequences))


def _unknown(tokens: list[int], tokenizer: Tokenizer) -> int:
    if tokenizer.unknown_id is None or tokenizer.unknown_id == tokenizer.eod_id:
        return 0
    return tokens.count(tokenizer.unknown_id)


@functools.lru_cache(maxsize=1)
def _tokenizer(path: str, eod: str | None, modified: float) -> Tokenizer:
    """Open the tokenizer once in each process; ``modified`` notices that the file has changed."""
    return load_tokenizer(path, eod=eod)
