"""OpenAI's API: chat and text completions, models, tokens; request bodies in, answers and streams out."""
