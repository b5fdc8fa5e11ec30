"""A server's settings beside its engine's; the command line makes a flag of each field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from draftproof.schema import check_choice, check_number, check_whole, documented
from draftproof.server.parsers import Syntax

LogFormat = Literal["text", "json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of a server. A request beyond a limit gets a 4xx that names the limit."""

    host: str = documented("127.0.0.1", "Address to listen at; 0.0.0.0 accepts other machines.")
    port: int = documented(8000, "Port to listen at; 0 for any that is free.")
    api_key: Sequence[str] = documented(
        (),
        "API key, required on every route but /health, /ready and the page's files; may be given several times.",
    )
    page: bool = documented(True, "Serve a page at / to try the model in a browser.")
    served_model_name: Sequence[str] = documented(
        (), "Name that clients call the model by; may be given several times. Left out: the model as given."
    )
    ssl_certfile: str | None = documented(None, "Certificate for https, a PEM file; needs --ssl-keyfile.")
    ssl_keyfile: str | None = documented(None, "Private key of the certificate, a PEM file.")
    cors_origin: Sequence[str] = documented(
        (), "Origin whose web pages may send requests, or *; may be given several times."
    )
    metrics_prefix: str = documented(
        "draftproof:", "Prefix of names in /metrics; vllm: for dashboards that expect that."
    )
    max_body_bytes: int = documented(8 << 20, "Maximum size of a request's body, in bytes.")
    max_prompt_chars: int = documented(
        1 << 20, "Maximum length of a request's prompts or messages, in characters."
    )
    max_choices: int = documented(128, "Maximum number of outputs of one request: n times its prompts.")
    max_stop_strings: int = documented(
        64, "Maximum number of stop strings, and of bad words, of one request."
    )
    max_stop_chars: int = documented(
        4096, "Maximum total length of stop strings, and of bad words, of one request, in characters."
    )
    max_listed_ids: int = documented(
        4096, "Maximum number of entries of allowed_token_ids, of stop_token_ids and of logit_bias."
    )
    max_grammar_chars: int = documented(
        1 << 16,
        "Maximum length of a schema, regex, grammar or list of choices, in characters.",
    )
    max_logprobs: int = documented(20, "Maximum number of log-probabilities per token.")
    max_open_requests: int = documented(
        512, "Maximum number of outputs being computed or waiting; further requests get a 429."
    )
    max_open_tokens: int = documented(
        1 << 20, "Maximum number of prompt tokens of all open outputs; further requests get a 429."
    )
    max_open_bytes: int = documented(
        1 << 30, "Most bytes of bodies of all open requests together; beyond them requests get a 429."
    )
    max_connections: int = documented(
        2048, "Maximum number of connections; beyond it silent ones are closed, then new ones get a 503."
    )
    client_timeout: float = documented(
        30.0, "Seconds that a client has to send headers, to send a body, and to read some of its answer."
    )
    chat_template_timeout: float = documented(
        5.0, "Seconds that the model's chat template may take for a request."
    )
    grammar_timeout: float = documented(
        10.0, "Seconds that preparing a request's schema or grammar may take."
    )
    keep_alive_interval: float = documented(
        15.0,
        "Seconds without a token after which a stream gets a comment, which keeps proxies from closing it.",
    )
    tool_call_parser: str | None = documented(
        None,
        "Syntax of the model's tool calls: hermes, llama3, mistral, ... or none. Left out: found in its chat template.",
    )
    reasoning_parser: str | None = documented(
        None,
        "Syntax of the model's reasoning: think, mistral, ... or none. Left out: found in its chat template.",
    )
    max_stored_responses: int = documented(
        1024, "Maximum number of stored answers of /v1/responses; 0 for none."
    )
    max_stored_chars: int = documented(
        64 << 20, "Maximum total length of their conversations, in characters."
    )
    log_format: LogFormat = documented("text", "text, or json: one object per line.")
    shutdown_timeout: float = documented(
        30.0,
        "Seconds that running requests have to finish after a stop signal; the server ends at most ten seconds later.",
    )

    def __post_init__(self) -> None:
        check_choice("log_format", self.log_format, get_args(LogFormat))
        check_whole("port", self.port, 0, 65535)
        for name in (
            "max_body_bytes",
            "max_prompt_chars",
            "max_choices",
            "max_stop_strings",
            "max_stop_chars",
            "max_listed_ids",
            "max_grammar_chars",
            "max_open_requests",
            "max_open_tokens",
            "max_open_bytes",
            "max_connections",
        ):
            check_whole(name, getattr(self, name), 1)
        for name in ("max_logprobs", "max_stored_responses", "max_stored_chars"):
            check_whole(name, getattr(self, name), 0)
        Syntax("", self.tool_call_parser, self.reasoning_parser)
        for name in ("client_timeout", "keep_alive_interval", "chat_template_timeout", "grammar_timeout"):
            check_number(name, getattr(self, name), above=0)
        check_number("shutdown_timeout", self.shutdown_timeout)
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError(
                f"ssl_certfile={self.ssl_certfile!r}, ssl_keyfile={self.ssl_keyfile!r}: https needs both"
            )
        if not all(self.api_key):
            raise ValueError("api_key='': must not be empty; leave it out to ask for none")
