-- Replaces the targets.
-- ARGV: prefix, then field, value, ...
local fields = {}
for i = 2, #ARGV do
  fields[#fields + 1] = ARGV[i]
end
redis.call('DEL', ARGV[1] .. 'slo')
redis.call('HSET', ARGV[1] .. 'slo', unpack(fields))
redis.call('INCR', ARGV[1] .. 'generation')
return 1
