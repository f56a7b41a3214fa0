"""Checks of errors and notices by what programs can read, so that rewording a sentence
fails no test.

What identifies an error is its type, its key, its section and the value at fault; a
notice has a code. Beyond these a test checks facts that the sentence must hold:
numbers, names and paths. Whole sentences are checked in
`tests/package/test_sentences.py` alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from wflmc import InputError, Plan
from wflmc.evaluation.summary import Evaluation
from wflmc.support.notices import Notice

UNCHECKED = object()
"""The default of checks that are left out."""


def missing_facts(text: str, facts: tuple[object, ...]) -> list[str]:
    """Return the facts that do not stand in a text as numbers or names of their own.

    >>> missing_facts("line 12 of plan.json", (12, "plan.json", 1))
    ['1']
    """
    return [
        str(fact)
        for fact in facts
        if not re.search(rf"(?<!\w){re.escape(str(fact))}(?!\w)", text)
    ]


@contextmanager
def raises_input_error(
    key: str,
    *facts: object,
    section: object = UNCHECKED,
    value: object = UNCHECKED,
    error: type[InputError] = InputError,
) -> Iterator[pytest.ExceptionInfo[InputError]]:
    """Expect an `InputError` about a key.

    Args:
        key: the argument at fault.
        *facts: numbers, names and paths that the sentence must hold.
        section: of a scenario, where the key is one of its keys.
        value: at fault, as the error keeps it.
        error: the type, where a narrower one is expected.
    """
    with pytest.raises(error) as caught:
        yield caught
    raised = caught.value
    assert raised.key == key, str(raised)
    assert missing_facts(str(raised), facts) == [], str(raised)
    if section is not UNCHECKED:
        assert raised.section == section, str(raised)
    if value is not UNCHECKED:
        assert raised.value == value, str(raised)


def least_number(error: InputError) -> float:
    """Return the only number of a requirement, such as a limit that can be kept."""
    (number,) = re.findall(r"\d[\d.]*(?:e[+-]?\d+)?", error.requirement)
    return float(number)


def names_key(stderr: str, key: str, *facts: object) -> bool:
    """Return whether a command ended with one sentence, about a key and with these
    facts.
    """
    sentence = stderr.removeprefix("wflmc: ")
    names_the_key = sentence.startswith(f"{key} ")
    return (
        names_the_key
        and sentence.count("\n") == 1
        and not missing_facts(sentence, facts)
    )


def notices_of(source: Mapping[str, list[str]] | Plan | Evaluation) -> list[Notice]:
    """Return the notices of a plan or an evaluation, or of the JSON of a command."""
    if not isinstance(source, Mapping):
        return list(source.notices)
    pairs = zip(source["warning_codes"], source["warnings"], strict=True)
    return [Notice(code, text) for code, text in pairs]


def codes_of(source: Mapping[str, list[str]] | Plan | Evaluation) -> list[str]:
    """Return the codes of the notices of a plan, an evaluation or a JSON."""
    return [str(notice.code) for notice in notices_of(source)]


def text_of(source: Mapping[str, list[str]] | Plan | Evaluation, code: str) -> str:
    """Return the only notice with a code, of a plan, an evaluation or a JSON."""
    (text,) = [notice.text for notice in notices_of(source) if notice.code == code]
    return text
