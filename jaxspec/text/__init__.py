"""Text processing: tokenizers, chat templates, incremental decoding, stop strings, and files of prompts."""

from jaxspec.text.chat import ChatTemplate as ChatTemplate
from jaxspec.text.incremental import IncrementalDecoder as IncrementalDecoder
from jaxspec.text.stops import StopStrings as StopStrings
from jaxspec.text.stops import cut_tokens as cut_tokens
from jaxspec.text.tokenizer import Tokenizer as Tokenizer
