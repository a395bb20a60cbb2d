"""Mistakes that a layout with shared prefixes may make."""

from dataclasses import replace

from lightrft.models import layout as layout_module, shared_prefix


def plant_paths(monkeypatch, other):
    """Let rows with a prefix have another one: other(path, stream tokens before) of one size."""
    right = layout_module.paths_of

    def wrong(*rows):
        return [
            (*other(path[:-1], path[-1][0]), path[-1]) if len(path) > 1 else path
            for path in right(*rows)
        ]

    monkeypatch.setattr(layout_module, "paths_of", wrong)


def size_of(prefix):
    return sum(stop - start for start, stop in prefix)


def see_a_brother(monkeypatch):
    """The prefix ends with the last tokens before the row, which are of another one."""
    plant_paths(monkeypatch, lambda prefix, before: ((before - size_of(prefix), before),))


def keep_a_stale_prefix(monkeypatch):
    """The prefix is that of the first row, whatever the row begins with."""
    plant_paths(monkeypatch, lambda prefix, before: ((0, size_of(prefix)),))


def shift_positions(monkeypatch):
    """Positions after the first row are one too large."""
    right = layout_module.TokenLayout.packed

    def shifted(cls, *args, **options):
        layout = right(*args, **options)
        if layout.bounds.shared is None:
            return layout
        positions = layout.position_ids.clone()
        positions[:, layout.bounds.offsets[1] :] += 1
        return replace(layout, position_ids=positions)

    monkeypatch.setattr(layout_module.TokenLayout, "packed", classmethod(shifted))


def count_gradients_once(monkeypatch):
    """Keys and values of a prefix get the gradient of the row that has it, not of its siblings."""
    right = shared_prefix.ReadRows.backward

    def once(ctx, gradient):
        end, masked = 0, gradient.clone()
        for path in ctx.paths:
            end += size_of(path)
            size = size_of(path[:-1])
            masked.narrow(ctx.dim, end - size_of(path), size).zero_()
        return right(ctx, masked)

    monkeypatch.setattr(shared_prefix.ReadRows, "backward", staticmethod(once))


SEEN = {
    "a sibling that sees its brother": see_a_brother,
    "a stale prefix of another row": keep_a_stale_prefix,
    "positions off by one": shift_positions,
}
FAULTS = {**SEEN, "a prefix whose gradient counts once": count_gradients_once}
