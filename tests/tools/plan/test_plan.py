"""Plans of the sizes that users rent: they fit, and what they say follows the options."""

import json
import re
from dataclasses import replace

import pytest
from tests.programs import run_python

from lightrft.cli.errors import ExitCode
from lightrft.cli.main import main
from lightrft.config import ConfigError, TrainConfig
from lightrft.reporting.files import write_start
from lightrft.run.gpus import GPUS, find_gpu, gpu_of
from lightrft.tools.model_presets import write_tiny_model
from lightrft.tools.plan.advice import advise
from lightrft.tools.plan.memory import gigabytes, plan_memory, with_budget
from lightrft.tools.plan.plan_command import COUNTS, count_table
from lightrft.tools.plan.setup import WITHOUT_REFERENCE, Setup
from lightrft.tools.plan.sizes import SHAPES, read_model_size
from lightrft.tools.plan.start_check import settle


def setup_of(name, gpus, gpu, **options):
    config, size = TrainConfig(engine_type="vllm", **options), SHAPES.get(name, name)
    return Setup(config, size, gpus, 8, True, GPUS[gpu].memory_bytes, "vllm")


@pytest.mark.parametrize(
    "name, gpus, gpu",
    [
        ("qwen2.5-7b", 8, "h100-80g"),
        ("qwen2.5-32b", 8, "h200-141g"),
        ("qwen2.5-0.5b", 1, "rtx4090-24g"),
    ],
)
def test_common_machines_get_settings_that_fit(name, gpus, gpu, capsys):
    code = main(["plan", "--pretrain", name, "--gpus", str(gpus), "--gpu", gpu])
    text = capsys.readouterr().out
    fits = "fits: these settings are feasible" in text
    assert code == (ExitCode.OK if fits else ExitCode.OUT_OF_MEMORY)
    assert fits or "feasible settings: --" in text
    advice = advise(setup_of(name, gpus, gpu))
    assert advice.plan.fits
    # What is recommended is a configuration that the program takes.
    assert TrainConfig(**advice.changes)


def test_what_cannot_fit_is_said_by_the_exit_code(capsys):
    code = main(["plan", "--pretrain", "qwen2.5-72b", "--gpus", "1", "--gpu", "l4-24g"])
    assert code == ExitCode.OUT_OF_MEMORY
    assert "more or larger GPUs" in capsys.readouterr().out


def test_settings_that_do_not_fit_end_a_plan_with_the_code_of_the_start_though_others_fit(capsys):
    argv = ["plan", "--pretrain", "qwen2.5-32b", "--gpus", "8", "--gpu", "h200-141g", "--fsdp"]
    assert main(argv) == ExitCode.OUT_OF_MEMORY
    assert "feasible settings: --" in capsys.readouterr().out
    assert main([*argv, "--json"]) == ExitCode.OUT_OF_MEMORY
    answer = json.loads(capsys.readouterr().out)
    assert not answer["fits"]
    assert answer["problems"]
    flags = [
        f"--{k}" if v is True else f"--{k}={v}" for k, v in answer["feasible_settings"].items()
    ]
    assert main([*argv, *flags, "--json"]) == ExitCode.OK
    answer = json.loads(capsys.readouterr().out)
    assert answer["fits"]
    assert max(answer["phases"].values()) <= answer["usable_bytes"]


@pytest.mark.parametrize("options", [{}, {"fsdp": True}])
def test_7b_full_fine_tuning_on_one_h100_is_refused_with_what_would_fit(options):
    setup = setup_of("qwen2.5-7b", 1, "h100-80g", **options, gradient_checkpointing=True)
    with pytest.raises(MemoryError) as caught:
        settle(setup, lambda text: None)
    assert "--lora_rank" in str(caught.value)
    assert ("--fsdp_cpu_offload" in str(caught.value)) is ("fsdp" in options)


def test_unknown_names_are_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="h100-80g"):
        find_gpu("h100-8g")
    with pytest.raises(ConfigError, match=r"no config\.json in 'nowhere'"):
        read_model_size("nowhere")


def test_a_device_is_found_by_its_name():
    assert gpu_of("NVIDIA H100 80GB HBM3") is GPUS["h100-80g"]
    assert gpu_of("NVIDIA H100 PCIe") is GPUS["h100-pcie-80g"]
    assert gpu_of("NVIDIA L40S") is GPUS["l40s-48g"]
    assert gpu_of("NVIDIA L4") is GPUS["l4-24g"]
    assert gpu_of("A card of tomorrow") is None


@pytest.mark.parametrize("name", GPUS)
def test_a_preset_has_the_numbers_of_its_data_sheet(name):
    gpu = GPUS[name]
    peak, kind = re.search(r"([\d,.]+) TFLOPS (sparse|dense)", gpu.source).groups()
    dense = float(peak.replace(",", "")) * {"sparse": 0.5, "dense": 1}[kind]
    assert gpu.tflops == pytest.approx(dense, rel=1e-3)
    assert f"{gpu.memory_bytes / 1e9:g}g" == name.rpartition("-")[2]


def test_options_change_what_they_should():
    plain = plan_memory(setup_of("qwen2.5-7b", 8, "h100-80g", fsdp=True))

    def phase(name, **options):
        plan = plan_memory(setup_of("qwen2.5-7b", 8, "h100-80g", **{"fsdp": True, **options}))
        return next(p for p in plan.phases if p.name == name).device_bytes

    def before(name):
        return next(p for p in plain.phases if p.name == name).device_bytes

    assert phase("train", gradient_checkpointing=True) < before("train")
    assert phase("train", lora_rank=16) < before("train")
    assert phase("train", micro_train_batch_size=2) > before("train")
    assert phase("train", generate_max_len=4096) > before("train")
    assert phase("train", fsdp=False, zero_stage=2) > phase("train", fsdp=False, zero_stage=3)
    assert phase("rollout", adam_offload=True) < before("rollout")
    assert phase("rollout", adam_8bit=True) < before("rollout")
    assert phase("rollout", init_kl_coef=0.01) > before("rollout")
    assert phase("train", advantage_estimator="gae") > before("train")
    assert phase("sync", engine_tp_size=2) < before("sync")
    assert phase("train", enable_engine_sleep=False) > before("train") + 0.4 * 80e9


def test_a_teacher_counts_with_its_own_size(tmp_path):
    write_tiny_model(tmp_path / "teacher", "tiny-qwen3")
    teacher = str(tmp_path / "teacher")
    size = read_model_size(teacher).parameters
    alone, taught = (
        setup_of("qwen2.5-0.5b", 1, "h100-80g", **more) for more in ({}, {"teacher": teacher})
    )
    assert taught.evaluated["teacher"].size.parameters == size > 0
    totals = [plan_memory(setup).worst.device_bytes for setup in (alone, taught)]
    assert totals[1] > totals[0]


def test_each_of_several_teachers_counts_unless_a_server_has_it(tmp_path):
    write_tiny_model(tmp_path / "teacher", "tiny-qwen3")
    one = f"a={tmp_path / 'teacher'}"

    def peak(*teachers):
        given = setup_of("qwen2.5-0.5b", 1, "h100-80g", teachers=teachers, fsdp=True)
        setup = replace(given, stage="divergence", engine="hf")
        return plan_memory(setup).worst.device_bytes

    both = (one, one.replace("a=", "b=", 1))
    assert peak(*both) > peak(one) > peak("s=http://127.0.0.1:1")
    assert peak(one, "s=http://127.0.0.1:1") == peak(one)


def test_planning_imports_no_torch():
    code = (
        "import sys, lightrft.tools.plan.plan_command;"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules); assert not heavy, heavy"
    )
    done = run_python("-c", code, timeout_seconds=120)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    "stage, said",
    [("toy", "a run of the stage toy: expected one of policy"), ("divergence", "--teacher is")],
)
def test_a_stage_that_cannot_be_planned_is_refused(tmp_path, capsys, stage, said):
    (tmp_path / "config.toml").write_text("")
    write_start(tmp_path / "run.json", world_size=1, stage=stage)
    argv = ["plan", "--pretrain", "qwen2.5-7b", "--config", str(tmp_path / "config.toml")]
    assert main(argv) == 2
    assert said in capsys.readouterr().err
    assert main([*argv, "--stage", "sft"]) == 2
    assert "one plan is of one stage" in capsys.readouterr().err


def test_the_stage_of_a_run_is_planned_without_an_engine(tmp_path, capsys):
    (tmp_path / "config.toml").write_text("max_row_tokens = 512\nfsdp = true\n")
    write_start(tmp_path / "run.json", world_size=1, stage="prefer")
    argv = ["plan", "--pretrain", "qwen2.5-0.5b", "--config", str(tmp_path / "config.toml")]
    assert main(argv) == ExitCode.OK
    text = capsys.readouterr().out
    assert "stage prefer" in text
    assert "reference" in text
    assert not any(word in text for word in ("engine", "rollout", "seconds", "sync"))
    # Both answers of four pairs.
    assert main([*argv, "--preference_loss", "simpo"]) == ExitCode.OK
    assert "reference" not in capsys.readouterr().out


def test_given_rows_change_what_they_should():
    size = SHAPES["qwen2.5-0.5b"]

    def plan(stage, *, longest=None, rows=1, **options):
        config = TrainConfig(fsdp=True, **options)
        given = {"stage": stage, "rows_per_item": rows, "longest_row": longest}
        return plan_memory(Setup(config, size, 2, 2, True, 80e9, "vllm", **given))

    def peak(*args, **given):
        return plan(*args, **given).worst.device_bytes

    base = peak("sft", longest=500)
    assert peak("sft", longest=1000) > base > peak("sft", longest=500, lora_rank=8)
    assert peak("sft") == peak("sft", longest=2048)
    assert peak("prefer", rows=2, longest=500) > peak("sft", longest=1000)
    # Without a reference two answers are as large as one that is twice as long.
    free = {"preference_loss": ("simpo", "sft")}
    assert peak("prefer", rows=2, longest=500, **free) == peak("sft", longest=1000)
    adapted = plan("prefer", rows=2, longest=500, lora_rank=8)
    assert not adapted.setup.evaluated
    assert peak("reward", rows=3, longest=500) > peak("reward", rows=2, longest=500)
    assert [phase.name for phase in plan("sft").phases] == ["load", "train", "save"]
    packed = {"packing_samples": True, "micro_batch_tokens": 1000}
    assert peak("sft", longest=100, **packed) == peak("sft", longest=1000, micro_train_batch_size=1)


def test_losses_without_a_reference_are_those_that_say_so():
    from lightrft.algorithms.interface import preference_loss_traits
    from lightrft.config.registry import PREFERENCE_LOSSES

    traits = {n: preference_loss_traits(PREFERENCE_LOSSES.load(n)) for n in PREFERENCE_LOSSES}
    assert {n for n, each in traits.items() if not each.uses_reference} == WITHOUT_REFERENCE


def test_a_plan_says_on_how_many_gpus_a_run_fits_and_with_which_micro_batches():
    setup = setup_of("qwen2.5-7b", 8, "h100-80g", fsdp=True, engine_tp_size=2)
    head, _, *lines = count_table(setup)
    assert head == "| GPUs | memory of a rank | micro_batch_tokens |"
    rows = {int(count): rest for count, *rest in (line.split("|")[1:-1] for line in lines)}
    assert list(rows) == [number for number in COUNTS if number > 1]
    assert rows[2] == [" too large ", "  "]
    memory = [float(cell.split()[0]) for cell, _ in rows.values() if "GB" in cell]
    assert memory[0] > memory[-1]
    wide = plan_memory(with_budget(replace(setup, world_size=64)))
    assert rows[64][0].strip() == gigabytes(wide.worst.device_bytes)
    assert int(rows[64][1]) == wide.setup.config.micro_batch_tokens


def test_the_table_names_its_settings_and_fills_nodes_and_their_memory(capsys):
    argv = ["plan", "--pretrain", "qwen2.5-7b", "--host_memory", "200", "--adam_offload"]
    for gpus, title, rows in (
        ("1", "With these settings:", {4: "56.7 GB", 8: "too large"}),
        ("8", "With --fsdp:", {2: "too large", 4: "63.1 GB"}),
    ):
        main([*argv, "--gpus", gpus])
        _, table = capsys.readouterr().out.split(f"\n\n{title}\n")
        for number, memory in rows.items():
            assert f"\n| {number} | {memory} |" in table
