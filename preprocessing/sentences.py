"""Cuts text into sentences, for objectives that pair them."""

from ds_engine.errors import DataError


def split_sentences(text: str) -> list[str]:
    """Return the sentences of ``text``, which joined give it back.

    White space between two sentences stays with the second: so a tokenizer that marks the space
    before a word sees the words as it does in the whole text.

    Args:
        text: English, or another language that ends sentences likewise; a text in which no end is
            found is one sentence.

    Raises:
        DataError: the library that knows sentences is not installed.
    """
    try:
        import nupunkt
    except ImportError as error:
        raise DataError("--split-sentences needs nupunkt: pip install nupunkt") from error
    # The ends are where the library's segments end without their white space.
    spans = nupunkt.load("default").spans(text)
    ends = sorted({end for _, end in spans if 0 < end < len(text)})
    if ends and not text[ends[-1] :].strip():
        ends.pop()  # white space at the end of the text is no sentence
    return [text[low:high] for low, high in zip([0, *ends], [*ends, len(text)], strict=True)]
