"""From token ids to text: characters, stop strings, and which tokens they belong to."""
