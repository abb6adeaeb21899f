-- Makes a stored version of a profile's constants current.
-- ARGV: prefix, profile, version
local pointer = ARGV[1] .. 'constants:' .. ARGV[2]
if redis.call('EXISTS', pointer .. ':' .. ARGV[3]) == 0 then
  return 0
end
local time = redis.call('TIME')
redis.call('HSET', pointer, 'version', ARGV[3],
  'changed_unix', string.format('%d.%06d', time[1], time[2]))
redis.call('INCR', ARGV[1] .. 'generation')
return 1
