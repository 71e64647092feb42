"""Pictures: found, checked, turned into tokens and numbers; and what is trained of a vision-language model."""

import importlib
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Image as ImageFeature, List, Value
from PIL import Image
from transformers import Idefics2Config, Idefics2ForConditionalGeneration, Idefics2Processor
from transformers.models.idefics2.image_processing_pil_idefics2 import Idefics2ImageProcessorPil

from common.base.errors import BadInputError
from common.base.paths import REPOSITORY
from common.base.run_config import RunConfig
from common.data.batches import TrainingRows
from common.data.pictures import open_picture, picture_ids, pixels_of, reference_to, with_noise
from common.data.row_checks import digest
from common.data.rows import IGNORED_LABEL, NO_ROW, Row, Splits, Tokens
from common.data.splits import load_splits, tokens_of
from common.models.loading import any_shape_config, load_base_model, load_tokenizer
from common.models.trained_weights import parameter_counts, vision_modules, with_trained_weights
from common.tasks.objectives import objective_of
from common.training.export import rows_to_compare
from tests.row_files import rows_in, sizes, write

ASKED = [{"role": "user", "content": "What is this?"}, {"role": "assistant", "content": "A coin."}]
TEXT, SAID = {"type": "text", "text": "What is this?"}, ASKED[1]
LLAVA = [{"from": "human", "value": "<image>\nWhat is this?"}, {"from": "gpt", "value": "A coin."}]
PARTS = [
    {"role": "user", "content": [{"type": "image"}, TEXT]},
    {"role": "assistant", "content": [{"type": "text", "text": "A coin."}]},
]


def changed(**settings: Any) -> RunConfig:
    return RunConfig(task="visual_questions", **{"model": "assets/embedded_vision_base", **settings})


RUN = changed(data="assets/pictured_exhibits")


def draw(path: Path, mode: str = "RGB", size: tuple[int, int] = (40, 30), colour: object = None) -> Path:
    Image.new(mode, size, colour or 0).save(path)
    return path


def read(path: Path, rows: list[Row]) -> Splits:
    return load_splits(changed(data=write(path, rows)))


def three_of(row: Callable[[int], Row]) -> list[Row]:
    return [row(number) for number in range(3)]


# -- one's own data


@pytest.mark.parametrize(
    "row",
    [
        lambda number: {"image": f"{number}.png", "messages": ASKED},
        lambda number: {"images": [f"{number}.png"], "messages": PARTS},
        lambda number: {"image": f"{number}.png", "question": "What is this?", "answer": "A coin."},
        lambda number: {"file_name": f"{number}.png", "prompt": "What is this?", "completion": "A coin."},
        lambda number: {"image": f"{number}.png", "file_name": f"{number}.png", "messages": ASKED},
        lambda number: {
            "messages": [{"role": "user", "content": [{"type": "image", "image": f"{number}.png"}, TEXT]}, SAID]
        },
        lambda number: {"image": f"{number}.png", "conversations": LLAVA},
    ],
)
def test_rows_with_paths_are_read_whatever_their_format(row: Callable[[int], Row], tmp_path: Path) -> None:
    for number in range(3):
        draw(tmp_path / f"{number}.png", colour=(number, 0, 0))
    found = rows_in(read(tmp_path / "rows.jsonl", three_of(row)))
    assert all(each["messages"] == ASKED for each in found)
    assert sorted(open_picture(each["picture"]).getpixel((0, 0))[0] for each in found) == [0, 1, 2]


def test_a_table_and_a_folder_of_pictures_are_read(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    for number in range(3):
        draw(tmp_path / "train" / f"{number}.jpg")
    rows = three_of(lambda number: {"file_name": f"{number}.jpg", "question": f"{number}?", "answer": "A coin."})
    of_table = read(tmp_path / "train" / "metadata.csv", rows)
    assert sizes(of_table) == sizes(load_splits(changed(data=str(tmp_path)))) == (1, 1, 1)


def test_questions_about_one_picture_come_into_one_split(tmp_path: Path) -> None:
    pictures = [draw(tmp_path / f"{number}.png", size=(8, 8), colour=(number, 0, 0)) for number in range(20)]
    rows = [{"image": each.name, "question": f"{n}?", "answer": "A"} for each in pictures for n in range(3)]
    splits = read(tmp_path / "rows.jsonl", rows)
    shown = [{row["picture"] for row in split} for split in (splits.train, splits.validation, splits.test)]
    assert [len(each) for each in shown] == [16, 2, 2]
    assert len(set.union(*shown)) == 20


def test_rows_about_too_few_pictures_are_divided_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw(tmp_path / "0.png")
    rows = [{"image": "0.png", "question": f"{each}?", "answer": "A"} for each in range(30)]
    assert sizes(read(tmp_path / "rows.jsonl", rows)) == (24, 3, 3)
    assert "too few different pictures (1)" in capsys.readouterr().out


def test_pictures_within_a_parquet_file_stay_as_they_are(tmp_path: Path) -> None:
    picture = {"bytes": draw(tmp_path / "0.png", colour=(1, 2, 3)).read_bytes(), "path": None}
    features = Features({"images": List(ImageFeature()), "question": Value("string"), "answer": Value("string")})
    rows = three_of(lambda number: {"images": [picture], "question": f"{number}?", "answer": "A"})
    Dataset.from_list(rows, features=features).to_parquet(tmp_path / "rows.parquet")
    splits = load_splits(changed(data=str(tmp_path / "rows.parquet")))
    assert open_picture(splits.train[0]["picture"]).getpixel((0, 0)) == (1, 2, 3)


def test_the_same_question_about_another_picture_is_another_row() -> None:
    digests = [digest({"messages": ASKED, "picture": name, "picture_digest": of}) for name, of in ("a1", "b2", "c1")]
    assert digests[0] == digests[2] != digests[1]


# -- pictures that cannot be read


def bomb(path: Path) -> None:
    """A PNG whose header promises 400 million pixels."""
    header = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 100)), (b"IEND", b"")]
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + b"".join(
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
            for kind, data in chunks
        )
    )


def cut_off(path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (200, 200, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path, "JPEG")
    path.write_bytes(path.read_bytes()[:5000])


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one good picture, and others that cannot be read."""
    folder = tmp_path_factory.mktemp("pictures")
    draw(folder / "0.png")
    draw(folder / "deep.png", "I;16")
    (folder / "text.png").write_text("no picture")
    cut_off(folder / "cut.jpg")
    bomb(folder / "bomb.png")
    return folder


def test_bytes_are_kept_as_they_are() -> None:
    assert reference_to(b"bytes", None, "a row") == "data:image/*;base64,Ynl0ZXM="


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"image": "gone.png"}, "names the picture gone.png, which does not exist"),
        ({"image": "text.png"}, "text.png, that cannot be read"),
        ({"image": "cut.jpg"}, "cut.jpg, that is damaged"),
        ({"image": "bomb.png"}, "scale it down"),
        ({"image": "deep.png"}, "in mode I;16"),
        ({"image": "https://host/a.png"}, "only paths beside a data file"),
        ({"image": "A" * 6000}, "does not exist"),
        ({"image": "~nobody/a.png"}, "does not exist"),
        ({"image": 5}, "has '5' for a picture"),
        ({"image": {"bytes": None, "path": ""}}, "has '' for a picture"),
        ({"images": []}, "has no picture"),
        ({"images": ["0.png", "0.png"]}, "has 2 pictures, but a row takes one"),
    ],
)
def test_a_picture_that_cannot_be_read_is_refused_by_file_and_row(columns: Row, said: str, pictures: Path) -> None:
    good = {"image": "0.png", "messages": ASKED}
    with pytest.raises(BadInputError, match=rf"rows\.jsonl, line 2 .*{said}") as refused:
        read(pictures / "rows.jsonl", [good, {"messages": ASKED, **columns}])
    assert len(str(refused.value)) < 500


def test_a_picture_without_a_question_is_refused(pictures: Path) -> None:
    with pytest.raises(BadInputError, match=r"rows\.jsonl, line 1 has a picture and a `text`, but no question"):
        read(pictures / "rows.jsonl", [{"file_name": "0.png", "text": "A coin."}] * 2)


@pytest.mark.parametrize(
    ("mode", "colour", "seen"),
    [
        ("CMYK", (0, 0, 0, 0), (255, 255, 255)),
        ("P", 0, (0, 0, 0)),
        ("L", 7, (7, 7, 7)),
        ("RGBA", (9, 9, 9, 0), (255, 255, 255)),
    ],
)
def test_other_modes_become_rgb_and_what_is_transparent_white(
    mode: str, colour: object, seen: tuple[int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suffix = "tiff" if mode == "CMYK" else "png"
    for number in range(3):
        draw(tmp_path / f"{number}.{suffix}", mode, colour=colour)
    rows = three_of(lambda number: {"image": f"{number}.{suffix}", "messages": ASKED})
    assert open_picture(read(tmp_path / "rows.jsonl", rows).train[0]["picture"]).getpixel((0, 0)) == seen
    said = re.findall(r"(\w+) pictures are transparent in places.*rows\.jsonl, (line \w+)", capsys.readouterr().out)
    assert said == ([("3", "line 1")] if mode == "RGBA" else [])


def test_a_model_of_texts_alone_is_refused() -> None:
    with pytest.raises(
        BadInputError, match="embedded_base is of the kind llama, which is not one of the kinds that see"
    ):
        load_tokenizer(changed(model="assets/embedded_base"))


# -- tokens and numbers


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(RUN)


@pytest.fixture(scope="module")
def shipped() -> Splits:
    """Read once, as all its pictures are looked at."""
    return load_splits(RUN)


@pytest.fixture(scope="module")
def rows(tokenizer: Any, shipped: Splits) -> list[Tokens]:
    return tokens_of(shipped.validation[:4], tokenizer, RUN)


def test_a_picture_has_its_tokens_before_the_question_and_none_is_learnt(
    tokenizer: Any, shipped: Splits, rows: list[Tokens]
) -> None:
    (whole,) = tokens_of(shipped.validation[:1], tokenizer, changed(train_on="all"))
    image = tokenizer.processor.image_token_id
    of_picture = [label for token, label in zip(whole["input_ids"], whole["labels"], strict=True) if token == image]
    assert of_picture == [IGNORED_LABEL] * 16
    learnt = tokenizer.decode([label for label in rows[0]["labels"] if label != IGNORED_LABEL])
    assert learnt == shipped.validation[0]["messages"][-1]["content"] + "<|end|>"


def test_the_tokens_are_those_of_the_processor_itself(tokenizer: Any, shipped: Splits, rows: list[Tokens]) -> None:
    for row, tokens in zip(shipped.validation[:4], rows, strict=True):
        messages = [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row["messages"][0]["content"]}]},
            {"role": "assistant", "content": [{"type": "text", "text": row["messages"][1]["content"]}]},
        ]
        text = tokenizer.processor.apply_chat_template(messages)
        picture = open_picture(row["picture"])
        theirs = tokenizer.processor(text=text, images=picture, add_special_tokens=False, return_tensors="pt")
        assert tokens["input_ids"] == theirs["input_ids"][0].tolist()
        assert torch.equal(pixels_of([row["picture"]], tokenizer)["pixel_values"], theirs["pixel_values"])


def test_the_tokens_of_a_large_picture_are_the_processor_s_also_where_the_camera_was_turned(tmp_path: Path) -> None:
    tokenizer, exif, found = load_tokenizer(RUN), Image.Exif(), []
    processor = tokenizer.processor
    processor.image_processor.do_image_splitting = True
    processor.image_processor.size = {"longest_edge": 256}
    for orientation in (1, 6):
        exif[0x0112], file = orientation, str(tmp_path / f"{orientation}.jpg")
        Image.new("RGB", (100, 40)).save(file, exif=exif)
        theirs = processor(text=processor.image_token, images=open_picture(file), add_special_tokens=False)
        found.append(picture_ids({"picture": file}, tokenizer))
        assert found[-1] == theirs["input_ids"][0]
    assert found[0] != found[1]


@pytest.mark.parametrize("said", [("<image> What? <image>", "A coin."), ("What?", "A coin. <image>")])
def test_a_place_of_a_picture_that_has_none_is_refused(said: tuple[str, str], tokenizer: Any, pictures: Path) -> None:
    messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), said, strict=True)]
    found = read(pictures / "rows.jsonl", three_of(lambda number: {"image": "0.png", "messages": messages}))
    with pytest.raises(BadInputError, match=r"rows\.jsonl, line \d has <image> in its texts"):
        tokens_of(found.test, tokenizer, RUN)


def test_a_picture_is_never_cut(tokenizer: Any, shipped: Splits) -> None:
    with pytest.raises(
        BadInputError, match=r"train\.parquet, row 1 .*image tokens end at position 19, beyond max_length, 15"
    ):
        tokens_of(shipped.train[:2], tokenizer, changed(max_length=15))


def test_noise_is_the_same_each_time_and_another_for_another_picture() -> None:
    picture, another = (Image.new("RGB", (64, 64), (grey, 128, 128)) for grey in (128, 129))
    first, again, other = (np.asarray(with_noise(each, 0.1), dtype=float) for each in (picture, picture, another))
    assert (first == again).all()
    assert (first[..., 1] != other[..., 1]).any()
    assert first.std() == pytest.approx(25.5, rel=0.05)
    assert with_noise(picture, 0.0) is picture


def test_a_batch_has_the_pictures_of_its_rows_also_of_a_row_that_does_not_count(
    tokenizer: Any, rows: list[Tokens]
) -> None:
    collate, numbered = objective_of(RUN).collator(tokenizer, None, RUN), TrainingRows(rows)
    assert collate([numbered[0], numbered[2]])["pixel_values"].shape == (2, 1, 3, 64, 64)
    alone = collate([numbered[NO_ROW]])
    assert (alone["input_ids"] == tokenizer.processor.image_token_id).sum() == 16
    assert (alone["labels"] == IGNORED_LABEL).all()


def test_rows_whose_logits_are_compared_keep_their_pictures(
    tokenizer: Any, rows: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.models.merging.LOGITS_AT_ONCE", 10 * len(tokenizer))
    loop = SimpleNamespace(
        run=RUN,
        model=SimpleNamespace(config=any_shape_config(RUN.model)),
        validation_rows=rows,
        args=SimpleNamespace(per_device_eval_batch_size=4),
    )
    assert rows_to_compare(loop) == rows[:1]


# -- what is trained


def model_of(run: RunConfig) -> torch.nn.Module:
    return with_trained_weights(load_base_model(run, {"": "cpu"}), run)


def trained_names(model: torch.nn.Module) -> list[str]:
    return [name for name, weight in model.named_parameters() if weight.requires_grad]


def learn(model: torch.nn.Module, rows: list[Tokens], tokenizer: Any) -> list[str]:
    """Return the names of the weights that rows have gradients for."""
    model(**objective_of(RUN).collator(tokenizer, None, RUN)(rows)).loss.backward()
    return [name for name, weight in model.named_parameters() if weight.grad is not None and weight.grad.any()]


@pytest.mark.parametrize(("targets", "layers"), [("all-linear", 7), ("q_proj,v_proj", 2)])
def test_adapters_stand_in_the_language_layers_alone(targets: str, layers: int) -> None:
    model = model_of(changed(target_modules=targets, lora_dropout=0.0))
    trained = trained_names(model)
    assert all(".text_model.layers." in name and "lora_" in name for name in trained)
    assert len(trained) == 2 * model.config.get_text_config().num_hidden_layers * layers


@pytest.mark.parametrize("targets", ["all-linear", "all"])
def test_full_fine_tuning_leaves_the_tower_as_it_is_and_it_counts_in_no_token_s_operations(targets: str) -> None:
    model = model_of(changed(technique="full", target_modules=targets))
    trained, seeing = trained_names(model), tuple(vision_modules(model))
    assert not any(name.startswith(seeing) for name in trained)
    assert ("model.text_model.embed_tokens.weight" in trained) == (targets == "all")
    language = sum(weight.numel() for name, weight in model.named_parameters() if not name.startswith(seeing))
    assert parameter_counts(model)[1] == language


@pytest.mark.parametrize("technique", ["lora", "full"])
def test_tower_and_connector_are_trained_where_that_is_asked_for(
    technique: str, tokenizer: Any, rows: list[Tokens]
) -> None:
    moved = learn(model_of(changed(technique=technique, freeze_vision_tower=False)), rows[:2], tokenizer)
    for part in (r"vision_model.*encoder\.layers\.0\.mlp\.fc1", "connector", "text_model"):
        assert any(re.search(part, name) for name in moved), part


def test_a_name_that_no_language_layer_has_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"target_modules has 'fc1', but no linear layer of model\.text_model"):
        model_of(changed(target_modules="q_proj, fc1"))


# -- whether it looked (3.3)


@pytest.fixture
def utils(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "3.3_visual_question_answering" / "run_0_cpu_x1")
    return importlib.import_module("my_utils_visual_question_answering")


def test_another_picture_has_another_right_answer_to_the_same_kind_of_question(
    shipped: Splits, utils: ModuleType
) -> None:
    rows = shipped.test
    partners = utils.partners_of(rows)
    assert partners == utils.partners_of(rows)
    assert None not in partners
    pairs = [(row, rows[partner]) for row, partner in zip(rows, partners, strict=True)]
    assert not [row for row, other in pairs if row["kind"] != other["kind"] or set(row["facts"]) & set(other["facts"])]


def fact(says: str, kind: str = "colour") -> Row:
    return {"messages": [ASKED[0], {"role": "assistant", "content": says}], "facts": [says], "kind": kind}


def test_a_row_without_a_partner_is_left_out(utils: ModuleType) -> None:
    assert utils.partners_of([fact("red"), fact("red"), fact("blue", kind="shape")]) == [None, None, None]
    assert utils.partners_of([{"messages": fact(answer)["messages"]} for answer in ("A.", "B.")]) == [1, 0]


def test_the_commonest_answer_is_that_of_the_training_rows(utils: ModuleType) -> None:
    train, test = [fact("red"), fact("red"), fact("blue")], [fact("red"), *[fact("blue")] * 3]
    assert utils.commonest_share(train, test) == 0.25
    assert utils.commonest_share(train, [{"messages": ASKED}]) is None


# -- the kinds that see


def test_a_tiny_idefics2_reads_rows_and_takes_adapters(shipped: Splits, tmp_path: Path) -> None:
    """Its connector is another (a perceiver), and its pictures all have as many tokens."""
    tokenizer = load_tokenizer(RUN)
    pictures = Idefics2ImageProcessorPil(do_image_splitting=False, size={"longest_edge": 64, "shortest_edge": 48})
    processor = Idefics2Processor(pictures, tokenizer, image_seq_len=8, chat_template=tokenizer.chat_template)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Idefics2Config(
        image_token_id=processor.image_token_id,
        text_config={
            "model_type": "llama", "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, **sizes,
        },
        vision_config={"image_size": 64, "patch_size": 8, **sizes, "hidden_size": 32},
        perceiver_config={
            "hidden_size": 64, "resampler_n_latents": 8, "resampler_depth": 1, "resampler_n_heads": 4,
            "resampler_head_dim": 16, "num_key_value_heads": 2,
        },
    )  # fmt: skip
    Idefics2ForConditionalGeneration(config).save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    run = changed(model=str(tmp_path), lora_dropout=0.0)
    model, tokenizer = model_of(run), load_tokenizer(run)
    rows = tokens_of(shipped.validation[:2], tokenizer, run)
    assert rows[0]["input_ids"].count(tokenizer.processor.image_token_id) == 8
    assert {"text_model.layers" in name for name in learn(model, rows, tokenizer)} == {True}
