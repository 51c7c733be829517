# $ python examples/03_engine_by_hand.py
# step 1: request b got token 260
# step 1: request a got token 114
# step 2: request a got token 121
# step 2: request b got token 101
# step 3: request a got token 10
# step 3: request b got token 97
# step 4: request a got token 104
# step 4: request b got token 112
"""Drive the serving loop without server, process or model: two requests share every step."""

from enginehouse.contract.types import EngineRequest, EngineSettings, SamplingParams, StopParams, TextDelta
from enginehouse.engine.loop import StepEngine
from enginehouse_testkit.fake_runner import FakeRunner

runner = FakeRunner()
engine = StepEngine(runner, EngineSettings(slots=2), samplers={})
for name, prompt in (("a", "Once upon a time"), ("b", "The answer is")):
    request = EngineRequest(
        request_id=name,
        sampling=SamplingParams(temperature=0.8, seed=7),
        stopping=StopParams(max_tokens=4, ignore_eos=True),
    )
    engine.add(request, runner.tokenizer.encode(prompt, special=False))

num_steps = 0
while engine.has_work():
    num_steps += 1
    for name, event in engine.step():
        if isinstance(event, TextDelta) and event.token_ids:
            print(f"step {num_steps}: request {name} got token {event.token_ids[0]}")
engine.close()
