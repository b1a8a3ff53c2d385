"""From text files to one indexed data set: read, tokenize in worker processes, write in input
order.

The batches do not depend on the number of workers and results are written in input order, so the
output is byte for byte the same for any number. Nothing appears under the output's name unless all
went well.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from ds_engine.data.indexed_writer import IndexedWriter
from ds_engine.errors import DataError
from preprocessing.document import Document, Fields, Format, Record, read_document
from preprocessing.labels import collect_labels, number_labels
from preprocessing.pool import ordered_map
from preprocessing.report import Report
from preprocessing.sources.files import InputFile, find_inputs, read_records
from preprocessing.tokenize import load_tokenizer
from preprocessing.worker import Batch, Job, Task, find_labels, tokenize

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
        split_sentences: each sentence is a sequence of its document, and no end-of-document id is
            written.
        fields: keys of JSON lines; each is a sequence of its record's document, in this order, and
            no end-of-document id is written. Empty: the record is the one text of ``text_key``.
        label: the last of ``fields`` if it holds a class: a sequence of one id, its number.
        label_names: names of the classes 0, 1, ...; empty: all that the input has, sorted.
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
    split_sentences: bool = False
    fields: tuple[str, ...] = ()
    label: str | None = None
    label_names: tuple[str, ...] = ()


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
    check_options(options)
    report_path = Path(f"{output}.report.json")
    if report_path.exists() and not options.overwrite:
        raise DataError(f"{report_path} exists; choose another --output or pass --overwrite")
    files = find_inputs(inputs, pattern=options.pattern, format=options.format)
    if options.fields:
        _check_json(files)
    tokenizer = load_tokenizer(options.tokenizer, eod=options.eod)
    labels = list(options.label_names)
    if options.label is not None:
        labels = labels or _collect_labels(files, options)
        if labels and len(number_labels(labels)) > tokenizer.vocab_size:
            raise DataError(
                f"{len(labels)} classes do not fit the {tokenizer.vocab_size} ids of the tokenizer"
            )
    task = _task(options, labels)
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
            "ends_documents": task.ends_documents,
            "split_sentences": options.split_sentences,
            "fields": list(options.fields),
            "label": options.label,
            "labels": labels,
        },
    )
    with IndexedWriter(
        output, vocab_size=tokenizer.vocab_size, overwrite=options.overwrite
    ) as writer:
        batches = ordered_map(
            tokenize,
            _jobs(files, task, options, on_progress),
            workers=options.workers,
            describe=_describe,
        )
        with contextlib.closing(batches):  # ends the workers whatever happens here
            for batch in batches:
                writer.add_documents(batch.tokens, batch.lengths, batch.sequences)
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


def check_options(options: Options) -> None:
    """Refuse options that are out of range or do not go together.

    Raises:
        DataError: names the option.
    """
    if options.workers < 1:
        raise DataError(f"--workers {options.workers} must be at least 1")
    if not 0 <= options.max_bad_fraction <= 1:
        raise DataError(f"--max-bad-fraction {options.max_bad_fraction} must be in 0..1")
    names = ",".join(options.fields)
    if options.fields and options.split_sentences:
        raise DataError(f"--fields {names} and --split-sentences exclude each other")
    if options.fields and options.text_key != "text":
        raise DataError(f"--fields {names} and --text-key {options.text_key} exclude each other")
    if options.fields and options.format == "text":
        raise DataError(f"--fields {names} needs JSON lines; leave --format text out")
    if options.fields and (
        len(options.fields) < 2 or len(set(options.fields)) < len(options.fields)
    ):
        raise DataError(
            f"--fields {names}: name two or more different keys, such as input,target; for one "
            "text a record use --text-key"
        )
    if options.label is not None and options.label not in options.fields[-1:]:
        raise DataError(
            f"--label {options.label} must be the last of --fields ({names or 'not given'}), such "
            "as --fields text,label --label label"
        )
    if options.label_names and options.label is None:
        raise DataError("--label-names needs --label, the one of --fields that holds the class")
    if options.label is not None and len(options.fields) > 3:
        raise DataError(f"--fields {names}: a label follows one text or two")


def _check_json(files: Sequence[InputFile]) -> None:
    for file in files:
        if file.format != "jsonl":
            raise DataError(
                f"{file.path} is read as text, but --fields needs JSON lines; leave the file out, "
                "or give --format jsonl if it holds them"
            )


def _task(options: Options, labels: Sequence[str]) -> Task:
    return Task(
        tokenizer=options.tokenizer,
        eod=options.eod,
        text_key=options.text_key,
        split_sentences=options.split_sentences,
        fields=Fields(options.fields, options.label) if options.fields else None,
        labels={name: number for number, name in enumerate(labels)},
    )


def _collect_labels(files: Sequence[InputFile], options: Options) -> list[str]:
    """Read everything once for the names of the classes."""
    parts = ordered_map(
        find_labels,
        _jobs(files, _task(options, ()), options, lambda done, total: None),
        workers=options.workers,
        describe=_describe,
    )
    with contextlib.closing(parts):
        return collect_labels(parts)


def _describe(job: Job) -> str:
    return job.records[0].where


def _jobs(
    files: Sequence[InputFile],
    task: Task,
    options: Options,
    on_progress: Callable[[int, int], None],
) -> Iterator[Job]:
    total = sum(file.size for file in files)
    records = read_records(
        files, split_lines=options.split_lines, on_progress=lambda done: on_progress(done, total)
    )
    for batch in _batches(records):
        yield Job(task, batch)


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


def _count(report: Report, batch: Batch, inputs: Sequence[str]) -> None:
    report.records += batch.records
    report.bad += batch.bad
    report.documents += len(batch.sequences)
    report.sequences += len(batch.lengths)
    report.tokens += len(batch.tokens)
    report.unknown_tokens += batch.unknown
    report.add_problems(batch.problems)
    ends = list(accumulate(batch.sequences, initial=0))
    for argument, (low, high) in zip(batch.arguments, pairwise(ends), strict=True):
        documents, tokens = report.by_input[inputs[argument]]
        length = sum(batch.lengths[low:high])
        report.by_input[inputs[argument]] = (documents + 1, tokens + length)
