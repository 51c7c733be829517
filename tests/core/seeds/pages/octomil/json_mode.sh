curl http://localhost:8080/v1/chat/completions \
-H "Content-Type: application/json" \
-d '{
"model": "phi-4-mini",
"messages": [{"role": "user", "content": "List 3 programming languages as JSON."}],
"response_format": {"type": "json_object"}
}'
