"""Pictures: found, checked, turned into tokens and numbers; and what is trained of a model that sees."""

import csv
import io
import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image
from transformers import Idefics2Config, Idefics2ForConditionalGeneration, Idefics2Processor
from transformers.models.idefics2.image_processing_pil_idefics2 import Idefics2ImageProcessorPil

from common.base.errors import BadInputError
from common.base.run_config import RunConfig
from common.data.batches import TrainingRows
from common.data.pictures import open_picture, picture_ids, pixels_of, reference_to, with_noise
from common.data.row_checks import digest
from common.data.rows import IGNORED_LABEL, NO_ROW
from common.data.splits import load_splits, tokens_of
from common.models.loading import any_shape_config, load_base_model, load_tokenizer
from common.models.trained_weights import parameter_counts, vision_modules, with_trained_weights
from common.tasks.objectives import objective_of
from common.tasks.visual_questions import commonest_share, partners_of
from common.training.export import rows_to_compare

ASKED = [{"role": "user", "content": "What is this?"}, {"role": "assistant", "content": "A coin."}]
TEXT, SAID = {"type": "text", "text": "What is this?"}, ASKED[1]
LLAVA = [{"from": "human", "value": "<image>\nWhat is this?"}, {"from": "gpt", "value": "A coin."}]
PARTS = [
    {"role": "user", "content": [{"type": "image"}, TEXT]},
    {"role": "assistant", "content": [{"type": "text", "text": "A coin."}]},
]
RUN = RunConfig(task="visual_questions", model="assets/embedded_vision_base", data="assets/pictured_exhibits")


def changed(**settings: Any) -> RunConfig:
    return RunConfig(task="visual_questions", **{"model": RUN.model, **settings})


def draw(path: Path, mode: str = "RGB", size: tuple[int, int] = (40, 30), colour: object = None) -> Path:
    Image.new(mode, size, colour or 0).save(path)
    return path


def write(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> RunConfig:
    if name.endswith(".csv"):
        with (folder / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return changed(data=str(folder / name))


def three_of(row: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
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
def test_rows_with_paths_are_read_whatever_their_format(row: Callable[[int], Any], tmp_path: Path) -> None:
    for number in range(3):
        draw(tmp_path / f"{number}.png", colour=(number, 0, 0))
    run = write(tmp_path, three_of(row))
    splits = load_splits(run)
    read = [*splits.train, *splits.validation, *splits.test]
    assert all(each["messages"] == ASKED for each in read)
    assert sorted(open_picture(each["picture"]).getpixel((0, 0))[0] for each in read) == [0, 1, 2]


def test_a_table_and_a_folder_of_pictures_are_read(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    for number in range(3):
        draw(tmp_path / "train" / f"{number}.jpg")
    rows = three_of(lambda number: {"file_name": f"{number}.jpg", "question": f"{number}?", "answer": "A coin."})
    assert load_splits(write(tmp_path / "train", rows, "metadata.csv")).train
    splits = load_splits(changed(data=str(tmp_path)))
    assert len(splits.train) + len(splits.validation) + len(splits.test) == 3


def test_questions_about_one_picture_come_into_one_split(tmp_path: Path) -> None:
    rows = []
    for number in range(20):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number}.png")
        rows += [{"image": f"{number}.png", "question": f"{each}?", "answer": "A"} for each in range(3)]
    splits = load_splits(write(tmp_path, rows))
    shown = [{row["picture"] for row in split} for split in (splits.train, splits.validation, splits.test)]
    assert [len(each) for each in shown] == [16, 2, 2]
    assert len(set.union(*shown)) == 20


def test_rows_about_too_few_pictures_are_divided_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw(tmp_path / "0.png")
    rows = [{"image": "0.png", "question": f"{each}?", "answer": "A"} for each in range(30)]
    splits = load_splits(write(tmp_path, rows))
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (24, 3, 3)
    assert "too few different pictures (1)" in capsys.readouterr().out


def test_pictures_within_a_parquet_file_stay_as_they_are(tmp_path: Path) -> None:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), (1, 2, 3)).save(stream, "PNG")
    features = Features({"images": List(ImageFeature()), "question": Value("string"), "answer": Value("string")})
    rows = three_of(
        lambda number: {"images": [{"bytes": stream.getvalue(), "path": None}], "question": f"{number}?", "answer": "A"}
    )
    Dataset.from_list(rows, features=features).to_parquet(tmp_path / "rows.parquet")
    splits = load_splits(changed(data=str(tmp_path / "rows.parquet")))
    assert open_picture(splits.train[0]["picture"]).getpixel((0, 0)) == (1, 2, 3)


def test_the_same_question_about_another_picture_is_another_row() -> None:
    rows = [
        {"messages": ASKED, "picture": name, "picture_digest": of} for name, of in (("a", "1"), ("b", "2"), ("c", "1"))
    ]
    assert digest(rows[0]) != digest(rows[1])
    assert digest(rows[0]) == digest(rows[2])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"file_name": "0.png", "text": "A coin."}, "has a picture and a `text`, but no question"),
        ({"image": "https://host/a.png", "messages": ASKED}, "only paths beside a data file"),
        ({"image": "A" * 6000, "messages": ASKED}, "does not exist"),
        ({"image": "~nobody/a.png", "messages": ASKED}, "does not exist"),
    ],
)
def test_what_cannot_be_learnt_from_is_refused_in_one_sentence(row: dict[str, Any], said: str, tmp_path: Path) -> None:
    draw(tmp_path / "0.png")
    run = write(tmp_path, [row, row])
    with pytest.raises(BadInputError, match=rf"rows\.jsonl, line 1 .*{said}") as refused:
        load_splits(run)
    assert len(str(refused.value)) < 500


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


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: None, "names the picture 1.png, which does not exist"),
        (lambda path: path.write_text("no picture"), "cannot be read"),
        (cut_off, "is damaged"),
        (bomb, "scale it down"),
        (lambda path: draw(path, "I;16"), "in mode I;16"),
    ],
)
def test_a_picture_that_cannot_be_read_is_refused_by_file_and_row(
    make: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    for number in (0, 2):
        draw(tmp_path / f"{number}.png")
    make(tmp_path / "1.png")
    run = write(tmp_path, three_of(lambda number: {"image": f"{number}.png", "messages": ASKED}))
    with pytest.raises(BadInputError, match=rf"rows\.jsonl, line 2 .*{said}"):
        load_splits(run)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"images": ["0.png", "0.png"]}, "2 pictures, but a row takes one"),
        ({"images": []}, "no picture"),
        ({"image": 5}, "'5' for a picture"),
    ],
)
def test_a_row_has_one_picture(columns: dict[str, Any], said: str, tmp_path: Path) -> None:
    draw(tmp_path / "0.png")
    run = write(tmp_path, [{"image": "0.png", "messages": ASKED}, {"messages": ASKED, **columns}])
    with pytest.raises(BadInputError, match=rf"line 2 has {said}"):
        load_splits(run)


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
    run = write(tmp_path, three_of(lambda number: {"image": f"{number}.{suffix}", "messages": ASKED}))
    splits = load_splits(run)
    assert open_picture(splits.train[0]["picture"]).getpixel((0, 0)) == seen
    said = [line for line in capsys.readouterr().out.splitlines() if "transparent in places" in line]
    assert len(said) == (mode == "RGBA")
    assert all("3 pictures" in line and "rows.jsonl, line 1" in line for line in said)


def test_a_model_of_texts_alone_is_refused() -> None:
    with pytest.raises(
        BadInputError, match="embedded_base is of the kind llama, which is not one of the kinds that see"
    ):
        load_tokenizer(changed(model="assets/embedded_base"))


# -- tokens and numbers


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(RUN)


def test_a_picture_has_its_tokens_before_the_question_and_none_is_learnt(tokenizer: Any) -> None:
    run = changed(data="assets/pictured_exhibits", train_on="all")
    row = tokens_of(load_splits(run).validation[:1], tokenizer, run)[0]
    image = tokenizer.processor.image_token_id
    assert row["input_ids"].count(image) == 16
    assert {label for token, label in zip(row["input_ids"], row["labels"], strict=True) if token == image} == {
        IGNORED_LABEL
    }
    answers = tokens_of(load_splits(run).validation[:1], tokenizer, RUN)[0]
    learnt = [label for label in answers["labels"] if label != IGNORED_LABEL]
    assert tokenizer.decode(learnt) == load_splits(run).validation[0]["messages"][-1]["content"] + "<|end|>"


def test_the_tokens_are_those_of_the_processor_itself(tokenizer: Any) -> None:
    rows = load_splits(RUN).test[:3]
    ours = tokens_of(rows, tokenizer, RUN)
    for row, tokens in zip(rows, ours, strict=True):
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
    tokenizer = load_tokenizer(RUN)
    processor = tokenizer.processor
    processor.image_processor.do_image_splitting = True
    processor.image_processor.size = {"longest_edge": 256}
    picture, turned = Image.new("RGB", (100, 40)), Image.Exif()
    turned[0x0112] = 6
    picture.save(tmp_path / "wide.jpg")
    picture.save(tmp_path / "turned.jpg", exif=turned)
    found = {}
    for name in ("wide", "turned"):
        file = str(tmp_path / f"{name}.jpg")
        theirs = processor(text=processor.image_token, images=open_picture(file), add_special_tokens=False)
        found[name] = picture_ids({"picture": file}, tokenizer)
        assert found[name] == theirs["input_ids"][0]
    assert found["wide"] != found["turned"]


def test_a_picture_s_own_token_in_a_text_is_refused(tokenizer: Any) -> None:
    row = {**load_splits(RUN).train[0], "messages": [*ASKED, {"role": "user", "content": "And <image>?"}, ASKED[1]]}
    with pytest.raises(BadInputError, match=r"row 1 .* has <image> in its texts"):
        tokens_of([row], tokenizer, RUN)


@pytest.mark.parametrize("said", [("<image> What? <image>", "A coin."), ("What?", "A coin. <image>")])
def test_a_place_of_a_picture_that_has_none_is_refused(said: tuple[str, str], tokenizer: Any, tmp_path: Path) -> None:
    draw(tmp_path / "0.png")
    messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), said, strict=True)]
    run = write(tmp_path, three_of(lambda number: {"image": "0.png", "id": str(number), "messages": messages}))
    with pytest.raises(BadInputError, match="has <image> in its texts"):
        tokens_of(load_splits(replace(run, shared_rows="skip")).test, tokenizer, run)


def test_a_picture_is_never_cut(tokenizer: Any) -> None:
    run = changed(data="assets/pictured_exhibits", max_length=15)
    with pytest.raises(
        BadInputError, match=r"train\.parquet, row 1 .*image tokens end at position 19, beyond max_length, 15"
    ):
        tokens_of(load_splits(run).train[:2], tokenizer, run)


def test_noise_is_the_same_each_time_and_another_for_another_picture() -> None:
    picture, another = (Image.new("RGB", (64, 64), (grey, 128, 128)) for grey in (128, 129))
    first, again, other = (np.asarray(with_noise(each, 0.1), dtype=float) for each in (picture, picture, another))
    assert (first == again).all()
    assert (first[..., 1] != other[..., 1]).any()
    assert first.std() == pytest.approx(25.5, rel=0.05)
    assert with_noise(picture, 0.0) is picture


def test_a_batch_has_the_pictures_of_its_rows_also_of_a_row_that_does_not_count(tokenizer: Any) -> None:
    rows = TrainingRows(tokens_of(load_splits(RUN).train[:3], tokenizer, RUN))
    collate = objective_of(RUN).collator(tokenizer, None, RUN)
    batch = collate([rows[0], rows[2]])
    assert batch["pixel_values"].shape == (2, 1, 3, 64, 64)
    alone = collate([rows[NO_ROW]])
    assert (alone["input_ids"] == tokenizer.processor.image_token_id).sum() == 16
    assert (alone["labels"] == IGNORED_LABEL).all()


@pytest.mark.parametrize("picture", [b"bytes", {"bytes": None, "path": ""}, ""])
def test_what_is_no_picture_is_refused(picture: object, tmp_path: Path) -> None:
    if picture == b"bytes":
        assert reference_to(picture, tmp_path, "a row").startswith("data:image/")
        return
    with pytest.raises(BadInputError, match="for a picture"):
        reference_to(picture, tmp_path, "a row")


def test_rows_whose_logits_are_compared_keep_their_pictures(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.training.export.LOGITS_AT_ONCE", 10 * len(tokenizer))
    rows = tokens_of(load_splits(RUN).validation[:4], tokenizer, RUN)
    trainer = SimpleNamespace(
        strategy=SimpleNamespace(run=RUN),
        model=SimpleNamespace(config=any_shape_config(RUN.model)),
        eval_dataset=rows,
        args=SimpleNamespace(per_device_eval_batch_size=4),
    )
    assert rows_to_compare(trainer) == rows[:1]


# -- what is trained


@pytest.mark.parametrize("targets", ["all-linear", "q_proj,v_proj"])
def test_adapters_stand_in_the_language_layers_alone(targets: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = changed(target_modules=targets, lora_dropout=0.0)
    model = with_trained_weights(load_base_model(run, {"": "cpu"}), run)
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert trained
    assert all(".text_model.layers." in name and "lora_" in name for name in trained)
    layers = model.config.get_text_config().num_hidden_layers
    assert len(trained) == 2 * layers * (7 if targets == "all-linear" else 2)


@pytest.mark.parametrize("targets", ["all-linear", "all"])
def test_full_fine_tuning_leaves_the_tower_as_it_is(targets: str) -> None:
    run = changed(technique="full", target_modules=targets)
    model = with_trained_weights(load_base_model(run, {"": "cpu"}), run)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert not any(name.startswith(tuple(vision_modules(model))) for name in trained)
    assert ("model.text_model.embed_tokens.weight" in trained) == (targets == "all")


@pytest.mark.parametrize("technique", ["lora", "full"])
def test_tower_and_connector_are_trained_where_that_is_asked_for(technique: str) -> None:
    run = changed(technique=technique, freeze_vision_tower=False)
    model = with_trained_weights(load_base_model(run, {"": "cpu"}), run)
    tokenizer = load_tokenizer(run)
    rows = tokens_of(load_splits(RUN).validation[:2], tokenizer, RUN)
    model(**objective_of(run).collator(tokenizer, None, run)(rows)).loss.backward()
    moved = [name for name, weight in model.named_parameters() if weight.grad is not None and weight.grad.any()]
    assert any("vision_model" in name and "encoder.layers.0.mlp.fc1" in name for name in moved)
    assert any("connector" in name for name in moved)
    assert any("text_model" in name for name in moved)


def test_the_tower_counts_in_no_token_s_operations() -> None:
    run = changed(technique="full")
    model = with_trained_weights(load_base_model(run, {"": "cpu"}), run)
    seeing = sum(weight.numel() for name in vision_modules(model) for weight in model.get_submodule(name).parameters())
    _, multiplied = parameter_counts(model)
    assert multiplied == sum(weight.numel() for weight in model.parameters()) - seeing


def test_a_name_that_no_language_layer_has_is_refused() -> None:
    run = changed(target_modules="q_proj, fc1")
    with pytest.raises(BadInputError, match=r"target_modules has 'fc1', but no linear layer of model\.text_model"):
        with_trained_weights(load_base_model(run, {"": "cpu"}), run)


# -- whether it looked


def test_another_picture_has_another_right_answer_to_the_same_kind_of_question() -> None:
    rows = load_splits(RUN).test
    partners = partners_of(rows)
    assert partners == partners_of(rows)
    assert None not in partners
    for row, partner in zip(rows, partners, strict=True):
        assert row["kind"] == rows[partner]["kind"]
        assert not set(row["facts"]) & set(rows[partner]["facts"])


def test_a_row_without_a_partner_is_left_out() -> None:
    def row(fact: str, kind: str) -> dict[str, Any]:
        return {"messages": ASKED, "facts": [fact], "kind": kind}

    assert partners_of([row("red", "colour"), row("red", "colour"), row("blue", "shape")]) == [None, None, None]
    plain = [{"messages": [*ASKED[:1], {"role": "assistant", "content": answer}]} for answer in ("A.", "B.")]
    assert partners_of(plain) == [1, 0]


def test_the_commonest_answer_is_that_of_the_training_rows() -> None:
    def row(fact: str) -> dict[str, Any]:
        return {"messages": [*ASKED[:1], {"role": "assistant", "content": fact}], "facts": [fact], "kind": "colour"}

    train, test = [row("red"), row("red"), row("blue")], [row("red"), row("blue"), row("blue"), row("blue")]
    assert commonest_share(train, test) == 0.25
    assert commonest_share(train, [{"messages": ASKED}]) is None


# -- the kinds that see


def test_a_tiny_idefics2_reads_rows_and_takes_adapters(tmp_path: Path) -> None:
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
    model, tokenizer = with_trained_weights(load_base_model(run, {"": "cpu"}), run), load_tokenizer(run)
    rows = tokens_of(load_splits(RUN).validation[:2], tokenizer, run)
    assert rows[0]["input_ids"].count(tokenizer.processor.image_token_id) == 8
    model(**objective_of(run).collator(tokenizer, None, run)(rows)).loss.backward()
    trained = [name for name, weight in model.named_parameters() if weight.grad is not None]
    assert trained
    assert all("text_model.layers" in name for name in trained)
