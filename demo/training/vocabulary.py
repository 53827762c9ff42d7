"""The pair's tokenizer: byte-level BPE trained on the training text."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
VOCABULARY_SIZE = 4096

# The models know files, not dialogue: a system message reads as a comment and a user message as a
# docstring, which is how a module opens. The generation prompt is one newline, because in running
# text the blank line after a docstring is tokenised as two single newlines.
CHAT_TEMPLATE = (
    "{{- eos_token -}}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}"
    "{{- '# ' + message['content'].strip().replace('\\n', '\\n# ') + '\\n' -}}"
    "{%- elif message['role'] == 'user' -%}"
    "{{- '\"\"\"' + message['content'].strip().replace('\"\"\"', \"'''\") + '\"\"\"' -}}"
    "{%- elif message['role'] == 'assistant' -%}"
    "{{- '\\n\\n' + message['content'].strip() + '\\n\\n\\n' -}}"
    "{%- else -%}"
    "{{- raise_exception('roles are system, user and assistant, not ' + message['role']) -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '\\n' -}}{%- endif -%}"
)


def train_tokenizer(documents: list[str], context: int) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer of `VOCABULARY_SIZE` tokens: any text round-trips, no token is
    unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
