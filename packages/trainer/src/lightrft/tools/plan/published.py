"""Runs that others report, which predictions are compared with."""

from dataclasses import dataclass, replace

from lightrft.config import TrainConfig
from lightrft.run.gpus import Gpu
from lightrft.tools.plan.setup import ModelSize, Setup


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """A run that others report, on H100s with NVLink.

    Args:
        size: Of its model.
        num_gpus, engine_tp_size: Of it.
        mean_tokens, longest_tokens: Of a sample with its prompt.
        seconds: Of a step of 2,048 samples.
    """

    size: ModelSize
    num_gpus: int
    engine_tp_size: int
    mean_tokens: int
    longest_tokens: int
    seconds: float

    def setup(self, gpu: Gpu) -> Setup:
        """The run with this program's options."""
        prompt = PUBLISHED_PROMPT
        response = self.longest_tokens - prompt
        config = TrainConfig(
            engine_type="vllm",
            fsdp=True,
            rollout_batch_size=64,
            n_samples_per_prompt=32,
            train_batch_size=512,
            prompt_max_len=prompt,
            generate_max_len=response,
            engine_tp_size=self.engine_tp_size,
            init_kl_coef=0.01,
        )
        share = (self.mean_tokens - prompt) / response
        node, memory = min(8, self.num_gpus), gpu.memory_bytes
        machine = (self.num_gpus, node, True, memory, "vllm")
        return Setup(config, self.size, *machine, mean_length_share=share)


# NVIDIA NeMo-RL v0.4, GRPO on DGX H100, 2,048 samples of 64 prompts a step. Prompts are assumed,
# and the longest responses to be twice the mean.
PUBLISHED_PROMPT = 106
PUBLISHED_SOURCE = "NVIDIA NeMo-RL v0.4, GRPO on DGX H100, 2,048 samples a step"
_QWEN_MOE = replace(
    ModelSize(48, 2048, 768, 151_936, 32, 4, 128, False, has_qk_norm=True),
    num_experts=128,
    num_active_experts=8,
)
PUBLISHED = {
    "Llama-3.1-8B": PublishedRun(
        ModelSize(32, 4096, 14336, 128_256, 32, 8, 128, False), 16, 1, 1060, 2014, 97.7
    ),
    "Qwen3-32B": PublishedRun(
        ModelSize(64, 5120, 25600, 151_936, 64, 8, 128, False, has_qk_norm=True),
        *(32, 4, 3206, 6306, 393.0),
    ),
    "Qwen3-30B-A3B": PublishedRun(_QWEN_MOE, 32, 4, 3154, 6202, 225.0),
}
