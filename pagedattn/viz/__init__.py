"""Pictures of what the engine does, in three tiers: text, SVG, and a player.

`figure` is what all draw with; `story` is the example that most draw. Then by what is
drawn: a film of the scheduler (`film`, `strip`, `player`), pools (`pool`, `simulator`,
`shares`), the index (`chain`), tables of layer groups (`groups`), plans (`gantt`),
tiles of attention (`tiles`), tokens and candidates (`tokens`, `candidates`), costs
(`roofline`), a request between threads (`visit`, `lanes`), the package (`house`).
"""
