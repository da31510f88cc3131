"""Pictures of what the engine does, in three tiers: text, SVG, and a player."""
