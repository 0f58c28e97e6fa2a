"""An OpenAI-compatible speech server (extra `serve`); docs/serving.md."""
