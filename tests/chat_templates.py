"""Chat templates in the shapes of those that models come with, in our own words."""

LLAMA_2 = """
{%- set told = messages[0].content if messages[0].role == 'system' else none -%}
{%- set talk = messages[1:] if told else messages -%}
{%- for m in talk -%}
  {%- if (m.role == 'user') != (loop.index0 is even) -%}{{ raise_exception('roles take turns') }}
  {%- endif -%}
  {%- if m.role == 'user' -%}
    {%- set lead = '<<SYS>>\\n' + told + '\\n<</SYS>>\\n\\n' if told and loop.first else '' -%}
    {{- bos_token + '[INST] ' + (lead + m.content).strip() + ' [/INST]' -}}
  {%- else -%}{{- ' ' + m.content | trim + ' ' + eos_token -}}{%- endif -%}
{%- endfor -%}
"""

VICUNA = """
{{- bos_token -}}
{%- if messages[0].role != 'system' -%}{{- 'A chat.' -}}{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == 'system' -%}{{- m.content -}}
  {%- elif m.role == 'user' -%}{{- ' USER: ' + m.content.strip() -}}
  {%- else -%}{{- ' ASSISTANT: ' + m.content.strip() + eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- ' ASSISTANT:' -}}{%- endif -%}
"""

MISTRAL = """
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}{%- set told = messages[0].content + '\\n\\n' -%}
{%- else -%}{%- set told = '' -%}{%- endif -%}
{%- for m in messages if m.role != 'system' -%}
  {%- if m.role == 'user' -%}
    {{- ' [INST] ' + (told if loop.first else '') + m.content + ' [/INST]' -}}
  {%- else -%}{{- ' ' + m.content + eos_token -}}{%- endif -%}
{%- endfor -%}
"""

SYSTEM_BEFORE_THE_LAST = MISTRAL.replace("loop.first", "loop.last")

ZEPHYR = """
{%- for m in messages %}
{{ '<|' + m.role + '|>\\n' + m.content + eos_token }}
{%- if loop.last and add_generation_prompt %}
{{ '<|assistant|>\\n' }}
{%- endif %}
{%- endfor -%}
"""

CHATML = """
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + eos_token + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

GEMMA = """
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}{{- raise_exception('no system role') -}}{%- endif -%}
{%- for m in messages -%}
{%- set role = 'model' if m.role == 'assistant' else m.role -%}
{{- '<start>' + role + '\\n' + m.content | trim + eos_token + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start>model\\n' -}}{%- endif -%}
"""

DROPS_THOUGHTS = """
{%- set place = namespace(last=0) -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{%- set place.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
  {%- set said = m.content.split('</think>')[-1].lstrip('\\n') -%}
  {%- set thought = m.content.split('</think>')[0] if '</think>' in m.content else '' -%}
  {{- '<|im_start|>' + m.role + '\\n' -}}
  {%- if m.role == 'assistant' and loop.index0 > place.last -%}
    {{- '<think>' + thought.split('<think>')[-1] + '</think>\\n\\n' -}}
  {%- endif -%}
  {{- (said if m.role == 'assistant' else m.content) + eos_token + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

OPENS_THOUGHTS = DROPS_THOUGHTS.replace(
    "assistant\\n' -}}{%- endif", "assistant\\n<think>' -}}{%- endif"
)

NUMBERED = """
{%- for m in messages -%}
{{- '#' ~ loop.index ~ ' ' + m.role + ': ' + m.content + eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '#' ~ (messages | length + 1) ~ ' assistant: ' -}}{%- endif -%}
"""

LAST_IS_MARKED = """
{%- for m in messages -%}
{{- ('(last) ' if loop.last else '') + m.role + ': ' + m.content + eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant: ' -}}{%- endif -%}
"""

DATED = "{{- strftime_now('%d %b %Y') + ' ' -}}" + CHATML

WHOLE = {
    "llama-2": LLAMA_2,
    "vicuna": VICUNA,
    "mistral": MISTRAL,
    "zephyr": ZEPHYR,
    "chatml": CHATML,
    "gemma": GEMMA,
    "drops thoughts": DROPS_THOUGHTS,
    "numbered": NUMBERED,
    "dated": DATED,
}
"""Templates whose text of a conversation begins with that of its beginning."""

CHANGED = {"last is marked": LAST_IS_MARKED, "opens thoughts": OPENS_THOUGHTS}
"""Templates that change what they have made of a message once another follows."""
