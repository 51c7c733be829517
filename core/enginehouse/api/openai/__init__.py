"""OpenAI's API: chat and text completions, models, tokens; request bodies in, JSON and streamed responses out."""
