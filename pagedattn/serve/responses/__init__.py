"""`/v1/responses`: OpenAI's newer protocol, over chats, with a bounded store."""
