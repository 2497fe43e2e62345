"""One short adapter per diffusers family, and a tiny checkpoint of it to try things on without downloading anything."""
