"""From text files to one indexed data set: read, tokenize in worker processes, write in input
order.

The batches do not depend on the number of workers and results are written in input order, so the
output is byte for byte the same for any number. Nothing appears under the output's name unless all
went well.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ds_engine.data.indexed import IndexedWriter
from ds_engine.errors import DataError
from preprocessing.document import Document, Format, Problem, Record, read_document
from preprocessing.pool import ordered_map
from preprocessing.report import Report
from preprocessing.sources.files import InputFile, find_inputs, read_records
from preprocessing.tokenize import Tokenizer, load_tokenizer

_BATCH_BYTES = 1 << 20
_BATCH_RECORDS = 1024


@dataclass(frozen=True, slots=True)
class Options:
    """How to preprocess.

    Attributes:
        tokenizer: path of a tokenizer (see ``load_tokenizer``).
        eod: end-of-document token; None: the tokenizer's usual one.
        text_key: key of the text in JSON lines.
        workers: tokenizing processes.
        max_bad_fraction: share of records that may be dropped or repaired before the run fails.
        split_lines: text files hold one document a line.
        pattern: which files of a folder are read.
        format: reads every file this way, whatever its ending.
        overwrite: replace an existing output.
    """

    tokenizer: str
    eod: str | None = None
    text_key: str = "text"
    workers: int = 1
    max_bad_fraction: float = 0.0
    split_lines: bool = False
    pattern: str = "*"
    format: Format | None = None
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class _Job:
    """What a worker gets: it opens the tokenizer itself, once."""

    tokenizer: str
    eod: str | None
    text_key: str
    records: list[Record]


@dataclass(slots=True)
class _Batch:
    """What a worker returns: all ids in a row, and the length and argument of each document."""

    tokens: npt.NDArray[np.generic]
    records: int
    bad: int = 0
    unknown: int = 0
    lengths: list[int] = field(default_factory=list)
    arguments: list[int] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def preprocess(
    inputs: Sequence[str],
    output: str,
    options: Options,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Tokenize ``inputs`` into ``output.bin``, ``output.idx`` and ``output.report.json``.

    Args:
        inputs: files and folders (see ``find_inputs``).
        output: prefix of the files to write.
        options: how.
        on_progress: told the bytes read and the bytes in all.

    Returns:
        What was read, dropped and repaired.

    Raises:
        DataError: unusable options, inputs or tokenizer, an existing output, too many bad records,
            no document, or a worker that died. Nothing is then left under the output's name.
    """
    _check(options)
    report_path = Path(f"{output}.report.json")
    if report_path.exists() and not options.overwrite:
        raise DataError(f"{report_path} exists; choose another --output or pass --overwrite")
    files = find_inputs(inputs, pattern=options.pattern, format=options.format)
    tokenizer = load_tokenizer(options.tokenizer, eod=options.eod)
    report = Report(
        by_input=dict.fromkeys(inputs, (0, 0)),
        settings={
            "output": output,
            "tokenizer": options.tokenizer,
            "vocab_size": tokenizer.vocab_size,
            "eod_token": tokenizer.eod_token,
            "eod_id": tokenizer.eod_id,
            "text_key": options.text_key,
            "split_lines": options.split_lines,
            "max_bad_fraction": options.max_bad_fraction,
        },
    )
    with IndexedWriter(
        output, vocab_size=tokenizer.vocab_size, overwrite=options.overwrite
    ) as writer:
        batches = ordered_map(
            _tokenize,
            _jobs(files, options, on_progress),
            workers=options.workers,
            describe=lambda job: job.records[0].where,
        )
        with contextlib.closing(batches):  # ends the workers whatever happens here
            for batch in batches:
                writer.add_documents(batch.tokens, batch.lengths)
                _count(report, batch, inputs)
                if options.max_bad_fraction == 0:
                    report.check(0.0)  # no need to read on
        report.check(options.max_bad_fraction)
        if not report.documents:
            raise DataError(
                f"no document in {', '.join(inputs)}: {report.records} records were read, none "
                "has text; nothing was written"
            )
        report_path.unlink(missing_ok=True)
    report.write(report_path)
    return report


def read_documents(inputs: Sequence[str], options: Options, report: Report) -> Iterator[Document]:
    """Yield the good documents of ``inputs`` in this process, counting in ``report``.

    Raises:
        DataError: unusable inputs, or at the end more bad records than ``options`` allow.
    """
    files = find_inputs(inputs, pattern=options.pattern, format=options.format)
    for record in read_records(
        files, split_lines=options.split_lines, on_progress=lambda done: None
    ):
        document, problems = read_document(record, options.text_key)
        report.records += 1
        report.bad += any(problem.is_bad for problem in problems)
        report.add_problems(problems)
        if document is not None:
            report.documents += 1
            yield document
    report.check(options.max_bad_fraction)


def _check(options: Options) -> None:
    if options.workers < 1:
        raise DataError(f"--workers {options.workers} must be at least 1")
    if not 0 <= options.max_bad_fraction <= 1:
        raise DataError(f"--max-bad-fraction {options.max_bad_fraction} must be in 0..1")


def _jobs(
    files: Sequence[InputFile], options: Options, on_progress: Callable[[int, int], None]
) -> Iterator[_Job]:
    total = sum(file.size for file in files)
    records = read_records(
        files, split_lines=options.split_lines, on_progress=lambda done: on_progress(done, total)
    )
    for batch in _batches(records):
        yield _Job(options.tokenizer, options.eod, options.text_key, batch)


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    batch: list[Record] = []
    size = 0
    for record in records:
        batch.append(record)
        size += len(record.data)
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_RECORDS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@functools.lru_cache(maxsize=1)
def _tokenizer(path: str, eod: str | None, modified: float) -> Tokenizer:
    """Open the tokenizer once in each process; ``modified`` notices that the file has changed."""
    return load_tokenizer(path, eod=eod)


def _tokenize(job: _Job) -> _Batch:
    tokenizer = _tokenizer(job.tokenizer, job.eod, os.stat(job.tokenizer).st_mtime)
    batch = _Batch(tokens=np.empty(0, dtype=np.int32), records=len(job.records))
    kept: list[tuple[Record, Document]] = []
    for record in job.records:
        document, problems = read_document(record, job.text_key)
        batch.problems += problems
        batch.bad += any(problem.is_bad for problem in problems)
        if document is not None:
            kept.append((record, document))
    ids: list[int] = []
    encoded = tokenizer.encode_batch([document.text for _, document in kept])
    for (record, document), tokens in zip(kept, encoded, strict=True):
        if not tokens:
            batch.problems.append(
                Problem("empty", document.where, "the tokenizer leaves nothing of its text")
            )
            continue
        ids += tokens
        ids.append(tokenizer.eod_id)
        batch.lengths.append(len(tokens) + 1)
        batch.arguments.append(record.argument)
    kind = np.uint16 if tokenizer.vocab_size <= 65536 else np.int32
    batch.tokens = np.array(ids, dtype=kind)
    if tokenizer.unknown_id is not None and tokenizer.unknown_id != tokenizer.eod_id:
        batch.unknown = int(np.count_nonzero(batch.tokens == tokenizer.unknown_id))
    return batch


def _count(report: Report, batch: _Batch, inputs: Sequence[str]) -> None:
    report.records += batch.records
    report.bad += batch.bad
    report.documents += len(batch.lengths)
    report.tokens += len(batch.tokens)
    report.unknown_tokens += batch.unknown
    report.add_problems(batch.problems)
    for argument, length in zip(batch.arguments, batch.lengths, strict=True):
        documents, tokens = report.by_input[inputs[argument]]
        report.by_input[inputs[argument]] = (documents + 1, tokens + length)
