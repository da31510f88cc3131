"""`/v1/messages`: Anthropic's protocol, translated to chats and back."""
