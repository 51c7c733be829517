"""Settings: every class of them, how they are read, and what is read as strictly."""
