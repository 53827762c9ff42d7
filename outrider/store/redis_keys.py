"""What the Redis scripts share: keys that hold what they should.

Who has the Redis' password can write there what he likes, and another release may have kept other things
under a name. What cannot be used is taken away: else no worker could register, or no log be written, ever
again.
"""

from __future__ import annotations

KEEP = """
local function keep(kind, ...)
  for _, key in ipairs({...}) do
    local found = redis.call('TYPE', key).ok
    if found ~= 'none' and found ~= kind then redis.call('DEL', key) end
  end
end
"""
