"""A stage of 60 lines: linear regression; it says what a step draws and learns."""

from functools import partial

import torch
from torch.utils.data import Dataset

from lightrft.datasets.batch_stream import planned_steps
from lightrft.stages.stage import (
    Stage,
    TrainedModel,
    TrainedModels,
    Work,
    optimizer_step,
    record_total,
)

WEIGHTS = torch.tensor([1.0, -2.0, 0.5])


class Points(Dataset):
    """Points of a plane, with noise."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        inputs = torch.randn(3, generator=draw)
        return inputs, inputs @ WEIGHTS + 0.01 * torch.randn((), generator=draw)


class Regression(Stage):
    """The mean of (prediction - target)^2 over the points of a step, of all ranks."""

    item_name = "points"

    def __init__(self, config, strategy):
        self.config, self.strategy = config, strategy
        torch.manual_seed(config.seed)
        model = strategy.prepare_model(torch.nn.Linear(3, 1), is_training=True)
        optimizer = strategy.create_optimizer(model, lr=config.actor_learning_rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + 0.1 * n))
        ready = strategy.prepare((model, optimizer, schedule))
        self.models = TrainedModels((TrainedModel("model", *ready),))
        size = config.rollout_batch_size // strategy.world_size
        self.loader = strategy.setup_dataloader(Points(), size, collate_fn=list)

    def planned_steps(self):
        return planned_steps(self.loader, self.config, self.strategy.world_size)

    def draw(self, step):
        return step.data.next_batch()

    def update(self, batch, step):
        count = self.strategy.context.reduce_over_data(torch.tensor(float(len(batch))), "sum")
        shares = [partial(self._share, [point], count, step.metrics) for point in batch]
        optimizer_step(
            self.models.main,
            shares,
            training=self.strategy.training,
            metrics=step.metrics,
            timeout_minutes=self.config.timeout_minutes,
        )
        record_total("loss", self.strategy.context, step.metrics)
        return Work(("model",))

    def _share(self, points, count, metrics):
        inputs, targets = map(torch.stack, zip(*points, strict=True))
        noise = 1 + 0.1 * torch.rand(())  # random numbers are part of the state of a run
        share = noise * (self.models.main.model(inputs)[:, 0] - targets).square().sum() / count
        metrics.add_mean("loss", share, 0.0)
        return share

    def evaluate(self):
        inputs, targets = map(torch.stack, zip(*(Points()[i] for i in range(4)), strict=True))
        with torch.no_grad():
            error = (self.models.main.model(inputs)[:, 0] - targets).square().mean()
        return {"eval/fit": -float(error)}


class RegressionInputs:
    """Nothing is read."""

    def media_digests(self):
        return ()

    def decided(self, config, backend):
        return config

    def build(self, config, strategy):
        return Regression(config, strategy)

    def close(self):
        pass


def read_inputs(config):
    """The entry of the registry."""
    return RegressionInputs()
