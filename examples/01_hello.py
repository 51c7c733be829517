# $ enginehouse serve &
# $ python examples/01_hello.py
# The capital of France is Paris.
"""Ask a running server one question, with the openai package."""

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8080/v1", api_key="unused")
answer = client.chat.completions.create(
    model="starter",
    temperature=0,
    messages=[{"role": "user", "content": "Name the capital of France."}],
)
print(answer.choices[0].message.content)
