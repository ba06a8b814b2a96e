"""A run folder as plain data: settings, presets, events and one reader. No torch."""
