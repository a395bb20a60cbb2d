"""An environment as a user writes one: a calculator that the model may call."""

import operator
import re

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class Calculator:
    """Calculator of whole numbers; the model sees what is wrong with an expression."""

    def reset(self, **row: object) -> None:
        """Begin a conversation; `row` has the columns of the data, which are not needed here."""

    def calculate(self, expression: str) -> int:
        """Work out an expression of two whole numbers.

        Args:
            expression: Two whole numbers with +, - or * between them.

        Returns:
            The result.
        """
        match = re.fullmatch(r"(\d{1,9})([-+*])(\d{1,9})", expression.replace(" ", ""))
        if match is None:
            raise ValueError("expected two whole numbers with +, - or * between them")
        first, sign, second = match.groups()
        return int(OPERATORS[sign](int(first), int(second)))
