"""Sampling parameters: what is refused, and how it is said."""

from __future__ import annotations

import math

import numpy as np
import pytest

from replayssm.engine.params import SamplingParams
from replayssm.errors import InputError

BAD = [
    ({"n": 0}, "n is 0: it must be at least 1"),
    ({"n": 1.5}, "n is 1.5: a whole number is wanted"),
    ({"n": True}, "n is True: a whole number is wanted"),
    ({"max_tokens": 0}, "max_tokens is 0: it must be at least 1"),
    ({"max_tokens": None}, "max_tokens is None: a whole number is wanted"),
    ({"min_tokens": -1}, "min_tokens is -1: it must be at least 0"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9: max_tokens allows 8"),
    ({"temperature": -0.1}, "temperature is -0.1: it must be from 0 to 10000"),
    ({"temperature": 1e-9}, "temperature is 1e-09: it must be 0 (greedy) or at least 1e-06"),
    ({"temperature": math.nan}, "temperature is nan: it must be from 0 to 10000"),
    ({"temperature": math.inf}, "temperature is inf: it must be from 0 to 10000"),
    ({"temperature": 10**400}, "temperature is 1000"),
    ({"temperature": "1"}, "temperature is '1': a number is wanted"),
    ({"top_p": 0}, "top_p is 0: it must be above 0 and at most 1"),
    ({"top_p": 1.01}, "top_p is 1.01: it must be from 0 to 1"),
    ({"top_k": -1}, "top_k is -1: it must be at least 0"),
    ({"min_p": 1.1}, "min_p is 1.1: it must be from 0 to 1"),
    ({"presence_penalty": 2.1}, "presence_penalty is 2.1: it must be from -2 to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty is -3: it must be from -2 to 2"),
    ({"repetition_penalty": 0}, "repetition_penalty is 0: it must be from 0.01 to 100"),
    ({"seed": 2**63}, "seed is 9223372036854775808: it must be from"),
    ({"seed": "x"}, "seed is 'x': a whole number is wanted"),
    ({"stop": ("a", "")}, "stop has '': strings of at least one character are wanted"),
    ({"stop": (1,)}, "stop has 1: strings of at least one character are wanted"),
    ({"stop": 7}, "stop is 7: a string or some strings are wanted"),
    ({"stop": ["x"] * 65}, "stop has 65 entries: at most 64 are taken"),
    ({"stop_token_ids": (-1,)}, "stop_token_ids is -1: it must be at least 0"),
    ({"stop_token_ids": "12"}, "stop_token_ids is '12': token ids are wanted"),
    ({"ignore_eos": 1}, "ignore_eos is 1: True or False is wanted"),
    ({"logprobs": 21}, "logprobs is 21: it must be from 0 to 20"),
    ({"logit_bias": [1]}, "logit_bias is [1]: a mapping of token ids to numbers is wanted"),
    ({"logit_bias": {"a": 1}}, "logit_bias is 'a': a whole number is wanted"),
    ({"logit_bias": {3: 101}}, "logit_bias is 101: it must be from -100 to 100"),
    ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias has 1025 tokens: at most 1024 are taken"),
    ({"json_schema": ""}, "json_schema is '': text of at least one character is wanted"),
    ({"json_schema": {}}, "json_schema is {}: what json.dumps makes of it is wanted"),
    ({"json_schema": "{}", "regex": "a"}, "json_schema and regex were both given: a request keeps to one of them"),
    ({"regex": "a", "min_tokens": 2}, "min_tokens is 2 beside a json_schema or regex, which says where to end"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos was given beside a json_schema or regex"),
]


@pytest.mark.parametrize(("settings", "message"), BAD, ids=[message for _, message in BAD])
def test_a_value_out_of_its_range_is_refused_in_one_line(settings, message):
    with pytest.raises(InputError) as raised:
        SamplingParams(**settings)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 200


def test_what_a_program_may_give_is_taken_in_one_form():
    params = SamplingParams(
        stop="end", stop_token_ids=[np.int64(3)], logit_bias={np.int32(5): np.float32(1.5)}, top_k=np.int64(4)
    )
    assert params.stop == ("end",)
    assert params.stop_token_ids == (3,)
    assert params.logit_bias == {5: 1.5}
    assert type(next(iter(params.logit_bias))) is int


def test_defaults_change_nothing():
    params = SamplingParams()
    assert (params.greedy, params.penalised, params.constrained) == (False, False, False)
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(repetition_penalty=1.1).penalised
    assert SamplingParams(regex="a").constrained


@pytest.mark.parametrize("settings", [{"stop_token_ids": (3, 10)}, {"logit_bias": {10: 1.0}}], ids=str)
def test_tokens_that_the_model_does_not_have_are_refused(settings):
    params = SamplingParams(**settings)
    params.check_vocabulary(11)
    name = next(iter(settings))
    with pytest.raises(InputError, match=f"{name} has token id 10: the model's are from 0 to 9"):
        params.check_vocabulary(10)
