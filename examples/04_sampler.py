# $ python examples/04_sampler.py
# gap None: drew tokens [0, 1, 2, 3]
# gap 1.5: drew tokens [0, 1, 2]
# gap 0.5: drew tokens [0, 1]
"""Write a sampler once, for every backend: keep only tokens whose logit is close to the best one's."""

import numpy as np
from attrs import field, frozen

from enginehouse.contract.types import SamplingParams
from enginehouse.engine.sampling.plugin_steps import build_steps
from enginehouse.engine.sampling.sampler import SequenceSampler


@frozen(kw_only=True)
class Fields:
    """Request fields that clients may send; the default means off."""

    max_logit_gap: float | None = field(default=None, metadata={"description": "largest distance to the best token"})


class GapSampler:
    """What a plugin hands over in its hook ``register_samplers``."""

    name, api_version, request_fields, order = "gap", 1, Fields, 45

    def create(self, fields):
        if fields.max_logit_gap is None:
            return None
        return lambda candidates: candidates.logits[0] - candidates.logits <= fields.max_logit_gap


logits = np.array([2.0, 1.9, 1.0, 0.0], np.float32)  # (vocab_size,)
for gap in (None, 1.5, 0.5):
    params = SamplingParams(seed=1, extensions={"gap": {"max_logit_gap": gap}})
    steps = build_steps(params, {"gap": GapSampler()})
    sampler = SequenceSampler(params, choice=0, vocab_size=len(logits), steps=steps)
    drawn = [sampler.sample(logits.copy(), position).token_id for position in range(1000)]
    print(f"gap {gap}: drew tokens {sorted(set(drawn))}")
