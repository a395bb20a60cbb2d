"""The readers of the program's files, with valid files for each."""

import importlib
import json
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import numpy as np
from tests.rollout.journal_edits import lines_of


@dataclass(frozen=True)
class Reader:
    """What reads a folder.

    Args:
        files: That are damaged, below it.
        make: Writes valid ones into it.
        read: Reads it.
        error: Class of what it may raise; a list as MODULE:NAME.
        seal: Makes checksums true again after the content of a file was changed.
    """

    files: tuple[str, ...]
    make: Callable[[Path], object]
    read: Callable[[Path], object]
    errors: tuple[str, ...] = ()
    code: int = 2
    seal: Callable[[Path], object] | None = None


def by(reference, name=".", kind=str):
    """Return a function that calls what is named with a path below its folder."""
    module, _, names = reference.partition(":")

    def read(folder):
        function = attrgetter(names)(importlib.import_module(module))
        return function(kind(folder / name))

    return read


def files(texts):
    """Return a function that writes files of these texts into a folder."""

    def make(folder):
        for name, text in texts.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)

    return make


# ---- valid files and their readers ----


def make_audited(folder):
    from tests.tools.audit import world

    model = world.write_model(folder / "model")
    world.record_step(model, folder / "run", {"advantage_estimator": "gae", "init_kl_coef": 0.1})


def seal_record(folder):
    """The hashes of a damaged record made true again, where that is possible."""
    from lightrft.tools.audit.record import FACTS, seal

    path = folder / RECORD
    try:
        facts = json.loads((path / FACTS).read_bytes())
    except (OSError, ValueError, RecursionError):
        return
    if isinstance(facts, dict):
        seal(path, facts)


def audit(folder):
    from lightrft.tools.audit.report import as_table, audit_step

    return as_table(audit_step(folder / "run"))


RECORD = "run/audit/step_000001/"


JOURNAL = """\
{"event": "begin", "format": FORMAT, "step": 1, "batch": 0, "rank": 0, "world_size": 1, \
"weights": 3, "sampling": [42, 1.0, 1.0, -1], "environment": {"schemas": [], \
"answers_turns": false}}
{"event": "reset", "sample_id": 0, "told": null, "prompt_token_ids": [1, 2]}
{"event": "turn", "sample_id": 0, "turn": 0, "request_id": 5, "text": "a", "context_hash": "ab", \
"token_ids": [4, 5], "logprobs": [-0.5, -0.25], "logprobs_mode": "temperature", \
"finish_reason": "stop", "weights_version": 1}
{"event": "round", "round": 0, "sample_ids": [0]}
{"event": "observation", "sample_id": 0, "turn": 0, "token_ids": [3], "text_spans": []}
{"event": "end", "sample_id": 0, "reward": 1.0, "failure": null}
"""


def make_journal(folder):
    from lightrft.rollout.environments.journal_reading import FORMAT

    (folder / "journal").mkdir()
    lines = JOURNAL.replace("FORMAT", json.dumps(FORMAT)).splitlines()
    text = lines_of([json.loads(line) for line in lines])
    (folder / "journal/step-000001.rank-0.jsonl").write_text(text)


def seal_journal(folder):
    """The checksums of a damaged journal made true again."""
    path, lines, check = folder / "journal/step-000001.rank-0.jsonl", [], 0
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        text = line.rpartition(b', "check": ')[0]
        check = zlib.crc32(text, check)
        lines.append(text + b', "check": "%08x"}\n' % check)
    if lines:
        path.write_bytes(b"".join(lines))


def replay(folder):
    from lightrft.config import TrainConfig
    from lightrft.tools.replay.run_replay import read_step

    return read_step(folder, None, TrainConfig())


def make_gguf(folder):
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(str(folder / "m.gguf"), "llama")
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_token_list(["a", "bc", "d"])
    writer.add_token_scores([0.5, 1.0, 2.0])
    writer.add_tensor("token_embd.weight", np.zeros((3, 8), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_model(folder):
    from lightrft.tools.model_presets import write_tiny_model

    write_tiny_model(folder / "m", "tiny-qwen3", seed=1)


def plan_size(folder):
    from lightrft.tools.plan.sizes import read_model_size

    return read_model_size(str(folder / "m")).parameters


def load_tokenizer(folder):
    from lightrft.models import load_tokenizer as load

    return load(str(folder / "m"))("hello 12")


def make_checkpoint(folder):
    import torch

    from lightrft.strategy.checkpoints import folders
    from lightrft.strategy.checkpoints.files import FileWriter, save_state

    path = folder / "global_step1"
    path.mkdir()
    state = {"a": torch.ones(3), "b": (1, 2.5, None), "c": {"d": [True, "x"]}}
    save_state(path / "client_state", state, FileWriter())
    from lightrft.strategy.checkpoints.manifest import Manifest

    entries = tuple(
        folders.flush_and_hash(path, name)
        for name in ("client_state.json", "client_state.safetensors")
    )
    manifest = Manifest("global_step1", 1, "fsdp2", 1, files=entries)
    (path / "manifest.json").write_text(manifest.to_json())


def make_config(folder):
    from lightrft.config import TrainConfig

    TrainConfig(pretrain="m", policy_loss_args={"a": 1.0}).save(folder / "config.toml")


RUN = {
    "metrics.jsonl": """\
{"step": 1, "reward": 0.5, "kl": 0.1, "engine_hash": 1152921504606846977}
{"step": 2, "reward": 1.0, "kl": 0.1, "engine_hash": 1152921504606846978}
""",
    "samples.jsonl": """\
{"step": 1, "prompt": "p", "response": "r", "reward": 1.0, "group_id": 0, "tokens": ["a", "b"], \
"token_ids": [1, 2], "logprobs": [-0.5, -1.0]}
""",
    "events.jsonl": """\
{"unix_seconds": 1.7e9, "event": "started", "step": 0, "world_size": 1}
""",
    "run.json": '{"started_unix": 1.7e9, "world_size": 1, "versions": {"torch": "2"}}',
    "summary.json": '{"num_steps": 2, "world_size": 1}',
}


def make_run(folder):
    make_config(folder)
    files(RUN)(folder)


def report(folder):
    from lightrft.tools.report.page import render_report

    page = render_report(folder)
    found = re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", page)
    assert found is None, f"the page holds {found[0]!r}"
    page.encode()


def make_rows(folder):
    import pyarrow as arrow
    from pyarrow import parquet

    rows = [{"input": f"say {i}", "label": str(i)} for i in range(3)]
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "d.json").write_text(json.dumps(rows))
    parquet.write_table(arrow.Table.from_pylist(rows), folder / "d.parquet")


def read_rows(name):
    def read(folder):
        from lightrft.datasets.files import read_rows

        return read_rows(folder / name)

    return read


def read_recipe(folder):
    from lightrft.rewards.build import load_recipes

    return load_recipes(folder / "recipe.toml", column="kind", names=["a", "b"])


def make_carried(folder):
    from lightrft.rollout.in_flight import to_bytes
    from lightrft.rollout.source import InFlight

    (folder / "state.json").write_bytes(to_bytes(InFlight(), 0))


def read_carried(folder):
    from lightrft.config.files import read_bytes
    from lightrft.rollout.in_flight import from_parts

    return from_parts([read_bytes(folder / "state.json")], 0, rank=0, world_size=1)


KEY, ANSWER = "ab" * 32, "Score: 7\nbecause"


def make_answers(folder):
    from lightrft.tools.rewards.judge import AnswerCache

    cache = AnswerCache(folder / "answers")
    cache.put("cd" * 32, "Score: 1")
    cache.put(KEY, ANSWER)
    (folder / "answers").joinpath("rank_0.jsonl").rename(folder / "answers/rank_9.jsonl")


def read_answers(folder):
    from lightrft.tools.rewards.judge import AnswerCache

    found = AnswerCache(folder / "answers").get(KEY)
    assert found in (None, ANSWER), f"another answer is believed: {found!r}"


def make_media(folder):
    from PIL import Image
    from tests.datasets.film_files import film

    from lightrft.engines.media.sounds import as_wav

    frames = [Image.linear_gradient("L").resize((16, 16)).rotate(90 * i) for i in range(4)]
    for suffix in ("png", "jpg", "bmp", "tif", "ppm"):
        frames[0].convert("RGB").save(folder / f"a.{suffix}")
    for suffix in ("gif", "webp", "png"):
        path = folder / f"moving.{suffix}"
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=100)
    for suffix in ("mkv", "mp4", "avi"):
        (folder / f"film.{suffix}").write_bytes(film(suffix, num_frames=6, size=(32, 32)))
    tone = np.sin(np.arange(3200) / 5)
    (folder / "a.wav").write_bytes(as_wav(tone.astype(np.float32), 16000))


def read_media(names, kind):
    def read(folder):
        from lightrft.engines.media.sounds import as_audio
        from lightrft.engines.media.sources import as_image, as_video

        make = {"image": as_image, "video": as_video, "audio": as_audio}[kind]
        for name in names:
            make(name, name=name, folder=folder).decode()

    return read


def media(*names, kind):
    return Reader(
        names,
        make_media,
        read_media(names, kind),
        ("lightrft.engines.media.pictures:MediaError",),
        1,
    )


ROLLOUTS = "".join(
    '{"step": 1, "sample_id": NUMBER, "group_id": 0, "prompt_ids": [1, 2], "response_ids": [3, 4], '
    '"sampled_spans": [[0, 2]], "reward": 0.5, "accuracy": 1.0, "weights_version": 1, '
    '"truncated": false, "masked": false, "held_out": false, "has_media": false}\n'.replace(
        "NUMBER", str(number)
    )
    for number in range(3)
)


def read_rollouts(folder):
    from lightrft.tools.rows.row_file import read_samples

    return read_samples(folder / "rollouts.jsonl", holds_answers=False)


class Letters:
    """As much of a tokenizer as the origin of rows is compared with."""

    def convert_ids_to_tokens(self, ids):
        return [chr(97 + i) if i < 26 else None for i in ids]


def make_origin(folder):
    from lightrft.datasets.row_origin import write_origin

    (folder / "d.jsonl").write_text("{}\n")
    write_origin(folder / "d.jsonl", {"model": "m", "tokens": {"0": "a", "25": "z"}})


def seal_object(name):
    """Makes the hash of a sealed object true again."""

    def seal(folder):
        from lightrft.config.files import sealed

        try:
            values = json.loads((folder / name).read_bytes())
        except (OSError, ValueError, RecursionError):
            return
        if isinstance(values, dict):
            (folder / name).write_text(sealed(values))

    return seal


def read_origin(folder):
    from lightrft.datasets.row_origin import check_tokens, origin_of

    check_tokens(str(folder / "d.jsonl"), Letters())
    origin_of(folder / "d.jsonl", "")


def make_stored(folder):
    from lightrft.stages.preference.stored_reference import ReferenceOrigin, StoredReference

    origin = ReferenceOrigin("data", "template", "model")
    StoredReference(origin, ((-1.0, -2.5), (-0.5, -1.0)), ()).save(folder / "stored.json")


def read_stored(folder):
    from lightrft.stages.preference.stored_reference import ReferenceOrigin, read_stored as read

    return read(folder / "stored.json", ReferenceOrigin("data", "template"), (2, 0))


COUNTED = {
    "d.jsonl": "".join(f'{{"input": "say {number}"}}\n' for number in range(4)),
    "metrics.jsonl": "".join(
        f'{{"step": {step}, "skipped_steps": 0.5, "reward": 0.1}}\n' for step in (1, 2, 3)
    ),
    "run.json": '{"inputs": {"x": {"sha256": "0"}}}',
}


def count_steps(folder):
    from lightrft.config import TrainConfig
    from lightrft.tools.audit.decisions import read_left_out
    from lightrft.tools.audit.sources import count_recorded_rows

    config = TrainConfig(prompt_data=str(folder / "d.jsonl"))
    round(read_left_out("actor", folder, 3, config))
    count_recorded_rows(folder, config)


def cut_records(folder):
    """What a continued run does with the lines of later steps, and what it then counts."""
    from lightrft.reporting.files import JsonLines, drop_steps_after
    from lightrft.run.resume import damage_of_records

    for name in ("metrics.jsonl", "samples.jsonl", "events.jsonl"):
        if (folder / name).is_file():
            drop_steps_after(folder / name, 1)
            assert all(step <= 1 for step, _ in JsonLines(folder / name))
    damage_of_records(folder)


JUDGE = {
    "rubric.toml": '[right]\nquestion = "Is it?"\nweight = 2.0\n',
    "ask.txt": "{question} {mark}{response}{mark} of {prompt}\n",
}


def load_judge(folder):
    from lightrft.tools.rewards.judge_questions import load_grading

    return load_grading("judge", "none", str(folder / "ask.txt"), str(folder / "rubric.toml"))


def make_heads(folder):
    from safetensors.torch import save_file

    from lightrft.models.critic import Critic
    from lightrft.models.loading import SCORE_FILE
    from lightrft.models.reward_model import build_head

    make_model(folder)
    critic = Critic.from_pretrained(str(folder / "m"))
    critic.save_pretrained(folder / "m")
    head = build_head("last", critic.config.hidden_size, 1)
    save_file(head.state_dict(), folder / "m" / SCORE_FILE)


def read_heads(folder):
    from lightrft.models.critic import Critic
    from lightrft.models.reward_model import load_score_head

    critic = Critic.from_pretrained(str(folder / "m"))
    load_score_head(str(folder / "m"), critic.trunk)


def adapted_layer():
    import torch

    model, factors = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 4)}), {}
    for name, sizes in (("lora_A", (3, 2)), ("lora_B", (2, 4))):
        factors[name] = torch.nn.ModuleDict({"own": torch.nn.Linear(*sizes, bias=False)})
        model["a"].add_module(name, factors[name])
    return model, {n: each["own"].weight.detach() for n, each in factors.items()}


def make_adapters(folder):
    from safetensors.torch import save_file

    from lightrft.models.adapter_files import PREFIX, SETTINGS_FILE, WEIGHTS_FILE

    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["a"]}
    (folder / SETTINGS_FILE).write_text(json.dumps(settings))
    weights = {f"{PREFIX}a.{name}.weight": value for name, value in adapted_layer()[1].items()}
    save_file(weights, folder / WEIGHTS_FILE)


def read_adapters(folder):
    from lightrft.config import TrainConfig
    from lightrft.models.adapter_files import check_adapters, load_adapters

    config = TrainConfig(lora_rank=2, lora_alpha=4.0, lora_path=str(folder))
    model, _ = adapted_layer()
    check_adapters(config, model, ["a"])
    load_adapters(folder, model, "own")


def load_weights(folder):
    from lightrft.models.loading import load_causal_lm

    return load_causal_lm(str(folder / "m"), dtype="float32")


def read_phase(folder):
    from lightrft.strategy.distributed.process_end import read_phase as read

    return read(folder, 0)


CONFIG, LOADING = "lightrft.config.options:ConfigError", "lightrft.models.loading:ModelLoadError"
FILE, DATA = "lightrft.config.files:FileError", "lightrft.datasets.types:DataError"
MEDIA, ORIGIN = "lightrft.engines.media.pictures:MediaError", "d.jsonl.origin.json"
RECORD_ERRORS = ("lightrft.tools.audit.record:RecordError", CONFIG, FILE)
READERS = {
    "facts": Reader((RECORD + "facts.json",), make_audited, audit, RECORD_ERRORS, 2, seal_record),
    "arrays": Reader(
        (RECORD + "samples.safetensors", RECORD + "values.safetensors"),
        make_audited,
        audit,
        RECORD_ERRORS,
        seal=seal_record,
    ),
    "states": Reader(
        (RECORD + "before/actor/config.json", RECORD + "before/actor/state_00000.safetensors"),
        make_audited,
        audit,
        RECORD_ERRORS,
        seal=seal_record,
    ),
    "journal": Reader(
        ("journal/step-000001.rank-0.jsonl",),
        make_journal,
        replay,
        ("lightrft.tools.report.run_data:NotARunError",),
        seal=seal_journal,
    ),
    "gguf": Reader(
        ("m.gguf",),
        make_gguf,
        by("examples.smollm2.from_gguf:read_fields", "m.gguf", Path),
        (LOADING,),
    ),
    "plan": Reader(("m/config.json",), make_model, plan_size, (CONFIG, FILE)),
    "model config": Reader(
        ("m/config.json",), make_model, by("lightrft.models.loading:load_config", "m"), (LOADING,)
    ),
    "tokenizer": Reader(
        ("m/tokenizer.json", "m/tokenizer_config.json"), make_model, load_tokenizer, (LOADING,)
    ),
    "weights": Reader(
        ("m/model.safetensors",), make_model, by("lightrft.models.weight_files:count_model", "m")
    ),
    "manifest": Reader(
        ("global_step1/manifest.json",),
        make_checkpoint,
        by("lightrft.strategy.checkpoints.manifest:scan_checkpoints", kind=Path),
    ),
    "client state": Reader(
        ("global_step1/client_state.json", "global_step1/client_state.safetensors"),
        make_checkpoint,
        by(
            "lightrft.strategy.checkpoints.files:load_state",
            "global_step1/client_state",
            Path,
        ),
        ("lightrft.strategy.distributed.process_end:CheckpointError",),
    ),
    "options": Reader(
        ("config.toml",),
        make_config,
        by("lightrft.config:TrainConfig.load", "config.toml", Path),
        (CONFIG, FILE),
    ),
    "report": Reader(
        (
            "metrics.jsonl",
            "samples.jsonl",
            "events.jsonl",
            "run.json",
            "summary.json",
            "config.toml",
        ),
        make_run,
        report,
    ),
    **{
        name: Reader((name,), make_rows, read_rows(name), ("lightrft.datasets.types:DataError",), 4)
        for name in ("d.jsonl", "d.json", "d.parquet")
    },
    "recipe": Reader(
        ("recipe.toml",),
        files({"recipe.toml": "[math]\na = 1.0\n[chat]\nb = 0.5\n"}),
        read_recipe,
        (CONFIG, FILE),
    ),
    "carried": Reader(("state.json",), make_carried, read_carried, ("builtins:ValueError",), 1),
    "answers": Reader(("answers/rank_9.jsonl",), make_answers, read_answers),
    "pictures": media("a.png", "a.jpg", "a.bmp", "a.tif", "a.ppm", kind="image"),
    "animations": media("moving.gif", "moving.webp", "moving.png", kind="video"),
    "films": media("film.mkv", "film.mp4", "film.avi", kind="video"),
    "sounds": media("a.wav", kind="audio"),
    "rollouts": Reader(
        ("rollouts.jsonl",), files({"rollouts.jsonl": ROLLOUTS}), read_rollouts, (DATA,), 4
    ),
    "origin": Reader((ORIGIN,), make_origin, read_origin, (DATA,), 4, seal=seal_object(ORIGIN)),
    "stored reference": Reader(
        ("stored.json",), make_stored, read_stored, (CONFIG, FILE), 2, seal_object("stored.json")
    ),
    "counted steps": Reader(("metrics.jsonl", "d.jsonl", "run.json"), files(COUNTED), count_steps),
    "continued records": Reader(
        ("metrics.jsonl", "samples.jsonl", "events.jsonl", "run.json"), make_run, cut_records
    ),
    "judge": Reader(("rubric.toml", "ask.txt"), files(JUDGE), load_judge, (CONFIG,)),
    "chat template": Reader(
        ("chat.jinja",),
        files({"chat.jinja": "{% for m in messages %}{{ m.content }}{% endfor %}"}),
        by("lightrft.models.loading:read_template", "chat.jinja", Path),
        (CONFIG,),
    ),
    "model weights": Reader(("m/model.safetensors",), make_model, load_weights, (LOADING,)),
    "heads": Reader(
        ("m/value_head.safetensors", "m/score.safetensors"), make_heads, read_heads, (LOADING,)
    ),
    "adapters": Reader(
        ("adapter_config.json", "adapter_model.safetensors"),
        make_adapters,
        read_adapters,
        (CONFIG,),
    ),
    "phase": Reader(("0",), files({"0": '["save a checkpoint", 1.5]'}), read_phase),
}
