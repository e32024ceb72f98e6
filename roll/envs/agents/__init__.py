"""Agents of other frameworks, which ask the policy through an OpenAI-compatible endpoint."""
