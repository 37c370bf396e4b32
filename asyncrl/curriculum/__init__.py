"""Which prompt is asked next, and how several sources become one stream: arithmetic on indices, no prompts."""
