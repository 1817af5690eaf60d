"""The OpenAI-compatible HTTP face. `app.create_app` makes the ASGI application, `server.HttpServer` runs it."""
