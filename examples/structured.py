"""Answers that follow a JSON schema, a regex and a choice, with forced tokens drafted for free.

python examples/structured.py [MODEL]
"""

from __future__ import annotations

import json
import sys

from draftproof import LLM, SamplingParams, StructuredOutputsParams

CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "country": {"enum": ["France", "Japan", "Peru"]},
        "population": {"type": "integer", "minimum": 1, "maximum": 50_000_000},
    },
    "required": ["name", "country", "population"],
    "additionalProperties": False,
}


def main(model: str | None) -> None:
    """Prints each answer, and the tokens per pass of the model."""
    drafting = {"method": "chain", "drafters": [{"method": "ff"}, {"method": "ngram"}]}
    rules = {
        "Describe a large city as JSON: ": StructuredOutputsParams(json=CITY),
        "The time is now ": StructuredOutputsParams(regex="([01][0-9]|2[0-3]):[0-5][0-9]"),
        "Do cats like water? Answer: ": StructuredOutputsParams(choice=["yes", "no", "it depends"]),
    }
    with LLM(model, speculative_config=drafting) as llm:
        params = [
            SamplingParams(temperature=0, max_tokens=80, structured_outputs=rule) for rule in rules.values()
        ]
        for output in llm.generate(list(rules), params, use_tqdm=False):
            choice, rounds = output.outputs[0], output.metrics.speculation
            print(f"{output.prompt}{choice.text}    ({rounds.acceptance_length:.1f} tokens per pass)")
            if choice.text.startswith("{") and choice.finish_reason == "stop":
                json.loads(choice.text)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
