"""Conversations and chat templates: from messages to tokens, and which tokens are trained."""
