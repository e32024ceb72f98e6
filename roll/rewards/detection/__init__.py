"""The `detection` reward: boxes of objects in an image."""
