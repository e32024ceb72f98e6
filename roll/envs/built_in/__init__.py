"""The built-in environments, in folders by what they are about."""
