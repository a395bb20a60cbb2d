"""Options of one part of a run: what a student learns from."""

from __future__ import annotations

from dataclasses import dataclass

from lightrft.config.options import (
    DISTILL,
    algorithm_option,
)


@dataclass(kw_only=True)
class TeacherOptions:
    """What a student learns from."""

    teacher: str | None = algorithm_option(
        None,
        "Frozen model with the same tokens whose log-probabilities of the sampled tokens are an "
        "advantage: teacher_coef * (log p - log q). A folder; or http://HOST:PORT/v1[#MODEL], an "
        "OpenAI-compatible server with prompt_logprobs, whose key is the environment variable "
        "LIGHTRFT_TEACHER_KEY.",
        common=True,
        path="folder",
        commands=DISTILL,
    )
    teachers: tuple[str, ...] = algorithm_option(
        (),
        "Several teachers, NAME=TEACHER each; teacher_column says which one a row has.",
        commands=DISTILL,
    )
    teacher_column: str = algorithm_option(
        "teacher",
        "Column of the data with the name of the row's teacher.",
        acts_with="teachers",
        commands=DISTILL,
    )
    teacher_weights: tuple[float, ...] = algorithm_option(
        (),
        "Factor of each of the teachers, in their order; unset is 1 each.",
        acts_with="teachers",
        commands=DISTILL,
    )
    teacher_prompt_column: str | None = algorithm_option(
        None,
        "Column of the data that the teacher reads after the prompt, and the student does not: a "
        "solution, or feedback.",
        acts_with="teacher or teachers",
    )
    teacher_top_k: int | None = algorithm_option(
        None,
        "Tokens of which a served teacher gives probabilities, for divergences on rows; all others "
        "are one further outcome.",
        at_least=1,
        acts_with="teacher_form reverse or teacher_form forward or teacher_form jsd",
        commands=DISTILL,
    )
    teacher_tolerance: float = algorithm_option(
        0.01,
        "Mean difference in nats a token up to which a server's answers to one question are alike.",
        above=0,
        may_change=True,
        commands=DISTILL,
    )
    teacher_timeout_seconds: float = algorithm_option(
        600.0,
        "Deadline of a server's answers to the rows of one step, repetitions included.",
        above=0,
        may_change=True,
        commands=DISTILL,
    )
    offpolicy_fraction: float = algorithm_option(
        1.0,
        "Share of the rows of a step whose completions are those of the data; the student samples "
        "the others. Of the divergences on rows.",
        at_least=0,
        at_most=1,
        acts_with="teacher_form reverse or teacher_form forward or teacher_form jsd",
        commands=DISTILL,
    )
    teacher_coef: float = algorithm_option(
        1.0,
        "Weight of the teacher's advantage beside that of the rewards.",
        above=0,
        acts_with="teacher or teachers",
    )
    teacher_form: str = algorithm_option(
        "sampled",
        "Divergence from the teacher: sampled is that of sampled tokens; reverse, forward and jsd "
        "are those of the whole vocabulary, of the rows of lightrft distill.",
        acts_with="teacher or teachers",
        commands=DISTILL,
    )
    teacher_beta: float = algorithm_option(
        0.5,
        "Weight of the teacher in the mixture of jsd.",
        above=0,
        at_most=0.99,
        acts_with="teacher_form jsd",
        commands=DISTILL,
    )
