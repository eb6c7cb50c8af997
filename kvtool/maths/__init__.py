"""Pure tensor functions that know no policy and no model."""
