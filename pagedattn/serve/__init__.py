"""The HTTP server: OpenAI's protocol in front of the asynchronous engine.

Knows requests as JSON and answers as frames; it knows nothing of blocks, tensors or
kernels. `app.build_app` makes the application, `server.run` serves it, `cli.main` is
the command. Built in chapter 09.
"""
