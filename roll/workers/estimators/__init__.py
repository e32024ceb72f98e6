"""Workers of models that learn beside the policy what its tokens are worth."""
